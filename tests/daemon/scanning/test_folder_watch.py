"""Changes of watched folders are told, also of folders that come later; links lead nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import watchfiles

from daemon.process.long_tasks import LongTasks
from daemon.scanning.folder_watch import FolderWatch
from tests.daemon.no_thread import no_thread


class Told:
    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.watch, self.tasks = FolderWatch(self.changed.set), LongTasks(pause_s=0.01)
        self.tasks.start("watching", self.watch.run)

    async def until(self, change: Path) -> None:
        """Writes the file again and again: a watch takes a moment to begin."""
        self.changed.clear()
        async with asyncio.timeout(30):
            while not self.changed.is_set():
                await asyncio.to_thread(change.write_text, os.urandom(4).hex())
                await asyncio.sleep(0.1)


@pytest_asyncio.fixture
async def told() -> AsyncIterator[Told]:
    made = Told()
    yield made
    made.tasks.cancel()
    await asyncio.to_thread(made.watch.stop)


async def test_a_change_is_told_in_each_folder_also_a_later_one(tmp_path: Path, told: Told) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    told.watch.look_at([str(first)])
    assert told.changed.is_set(), "what happened before the watch has no event"
    await told.until(first / "x")
    second.mkdir()
    told.watch.look_at([str(first), str(second)])
    await told.until(second / "x")
    await told.until(first / "x")


async def test_the_same_folders_are_no_change(tmp_path: Path, told: Told) -> None:
    told.watch.look_at([str(tmp_path)])
    told.changed.clear()
    told.watch.look_at([str(tmp_path)])
    assert not told.changed.is_set()


async def test_folders_that_are_gone_do_not_end_the_watch(tmp_path: Path, told: Told) -> None:
    (tmp_path / "a").mkdir()
    told.watch.look_at([str(tmp_path / "gone"), str(tmp_path / "a")])
    await told.until(tmp_path / "a" / "x")
    told.watch.look_at([str(tmp_path / "gone")])
    told.watch.look_at([str(tmp_path / "a"), str(tmp_path / "gone")])
    await told.until(tmp_path / "a" / "x")


@pytest.mark.parametrize("error", [OSError("no watches left"), RuntimeError("not a folder"), KeyError("a bug")], ids=repr)
async def test_a_watch_that_fails_is_told_and_begins_again(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real, tries = watchfiles.watch, list[bool]()

    def failing(*folders: str, force_polling: bool, **options: Any) -> Any:
        tries.append(force_polling)
        if len(tries) <= 3:
            raise error
        return real(*folders, force_polling=False, **options)

    monkeypatch.setattr(watchfiles, "watch", failing)
    told.watch.look_at([str(tmp_path)])
    async with asyncio.timeout(30):
        while len(tries) < 4:  # each start of the watch tells of a change, too  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await told.until(tmp_path / "x")
    problem = f"{type(error).__name__}: {error}; it was started again"
    if isinstance(error, KeyError):
        assert tries == [False] * 4
        assert told.tasks.problems() == [f"watching failed 3 times in a row, at last with {problem}"]
    else:
        assert tries == [False, True, True, True], "polled before it fails"
        assert told.tasks.problems() == [f"watching failed 2 times in a row, at last with {problem}"]


async def test_what_happens_while_no_watch_runs_is_looked_for(tmp_path: Path) -> None:
    changed = asyncio.Event()
    watch = FolderWatch(changed.set)
    watch.look_at([str(tmp_path)])
    changed.clear()
    running = asyncio.ensure_future(watch.run())
    async with asyncio.timeout(30):
        await changed.wait()
        await asyncio.to_thread(watch.stop)
        await running


async def test_changes_are_looked_for_at_each_try_to_start_a_thread(tmp_path: Path) -> None:
    changed, tasks = asyncio.Queue[None](), LongTasks(pause_s=0.01)
    watch = FolderWatch(lambda: changed.put_nowait(None))
    with no_thread():
        tasks.start("watching", watch.run)
        async with asyncio.timeout(30):
            for _ in range(3):
                await changed.get()
        watch.stop()
    (problem,) = tasks.problems()
    assert "MemoryError: thread watch models" in problem
    tasks.cancel()


async def test_links_are_not_followed(tmp_path: Path, told: Told) -> None:
    """One to `/` would have every folder of the machine watched."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "everything").symlink_to("/")
    before = watches()
    told.watch.look_at([str(folder)])
    await told.until(folder / "x")
    assert watches() - before == 1


def watches() -> int:
    """Of inotify, in this process."""
    found = 0
    for fd in os.listdir("/proc/self/fdinfo"):
        with contextlib.suppress(FileNotFoundError):
            found += Path(f"/proc/self/fdinfo/{fd}").read_text().count("inotify wd")
    return found
