"""Decisions of the operator that cannot be saved: they hold, are told, and are saved as soon as that works."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from daemon.process.long_tasks import LongTasks
from daemon.record.state import NodeState
from daemon.record.state_keeper import StateKeeper

SAFETY_S = 60.0


class Disk:
    """Stands for os.fsync: full until it is not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real = os.fsync
        self.is_full = True
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, fd: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._real(fd)


def saved(folder: Path) -> NodeState:
    state = NodeState(str(folder))
    state.load()
    return state


async def test_it_is_tried_again_until_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, keeper = Disk(monkeypatch), StateKeeper(NodeState(str(tmp_path)), LongTasks(), retry_s=0.01)
    error = await keeper.remember("pin", "a")
    assert error is not None
    assert (error.code, error.status, error.exit_code) == ("state_not_saved", 507, 7)
    assert error.message.startswith(f"pin a: done, but not saved: state_dir {tmp_path}: No space left on device.")
    row = keeper.row()
    assert row is not None
    assert row["message"] == f"state_dir {tmp_path}: No space left on device"
    assert await keeper.remember("disable", "b") is not None
    disk.is_full = False
    async with asyncio.timeout(SAFETY_S):
        while keeper.problem:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert keeper.row() is None
    state = saved(tmp_path)
    assert (state.pinned, state.enabled) == ({"a": True}, {"b": False})
    await keeper.close()


async def test_saving_goes_on_after_an_error_that_nobody_thought_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, state, tasks = Disk(monkeypatch), NodeState(str(tmp_path)), LongTasks(pause_s=0.01)
    keeper = StateKeeper(state, tasks, retry_s=0.01)
    assert await keeper.remember("pin", "a") is not None
    disk.is_full, snapshot, errors = False, state.snapshot, [RecursionError("too deep")]
    monkeypatch.setattr(state, "snapshot", lambda: snapshot() if not errors else _raise(errors.pop()))
    async with asyncio.timeout(SAFETY_S):
        while keeper.problem:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert saved(tmp_path).pinned == {"a": True}
    (problem,) = tasks.problems()
    assert problem.startswith("saving the operator's decisions failed 1 times in a row, at last with RecursionError: too deep")
    await keeper.close()


async def test_the_stop_waits_for_a_try_that_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads would write one file."""
    disk, state, loop = Disk(monkeypatch), NodeState(str(tmp_path)), asyncio.get_running_loop()
    keeper, begun, go_on, writing = StateKeeper(state, LongTasks(), retry_s=0.01), asyncio.Event(), threading.Event(), 0
    assert await keeper.remember("pin", "a") is not None
    write = state.write

    def slow(snapshot: Any) -> None:
        nonlocal writing
        writing += 1
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(SAFETY_S)
        assert writing == 1
        write(snapshot)
        writing -= 1

    monkeypatch.setattr(state, "write", slow)
    disk.is_full = False
    async with asyncio.timeout(SAFETY_S):
        await begun.wait()
        closing = asyncio.ensure_future(keeper.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        go_on.set()
        await closing
    assert (keeper.problem, saved(tmp_path).pinned) == ("", {"a": True})


def _raise(error: Exception) -> Any:
    raise error


async def test_the_next_command_saves_what_an_earlier_one_could_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, keeper = Disk(monkeypatch), StateKeeper(NodeState(str(tmp_path)), LongTasks(), retry_s=3600)
    assert await keeper.remember("pin", "a") is not None
    disk.is_full = False
    assert await keeper.remember("unpin", "b") is None
    assert saved(tmp_path).pinned == {"a": True, "b": False}
    await keeper.close()


async def test_the_stop_tries_a_last_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, keeper = Disk(monkeypatch), StateKeeper(NodeState(str(tmp_path)), LongTasks(), retry_s=3600)
    assert await keeper.remember("enable", "a") is not None
    disk.is_full = False
    async with asyncio.timeout(SAFETY_S):
        await keeper.close()
    assert saved(tmp_path).enabled == {"a": True}
    disk.is_full = True
    keeper = StateKeeper(NodeState(str(tmp_path / "other")), LongTasks(), retry_s=3600)
    await keeper.remember("pin", "a")
    await keeper.close()
    assert "the next start finds older ones" in caplog.text
