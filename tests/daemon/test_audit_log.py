"""The audit log: what is written, and what a slow, full or hanging disk does to it and to the node."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config.load import ConfigError
from daemon.record import audit_log
from daemon.record.audit_log import AuditLog
from tests.daemon.no_thread import no_thread


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Disk:
    """Stands before os.write: it may be full after so many bytes, or hang until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.go, self.reached = threading.Event(), threading.Event()
        self.go.set()
        self._real = os.write
        monkeypatch.setattr("daemon.record.line_file.os.write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        self.reached.set()
        assert self.go.wait(60)
        if self.room is None:
            return self._real(fd, data)
        if not self.room:
            raise OSError(28, "No space left on device")
        num = self._real(fd, data[: self.room])
        self.room -= num
        return num


async def test_an_act_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    audit = AuditLog()
    audit.write("lost", why="it is off")
    audit.use(str(path), False)
    audit.write("command", "not_found", uid=0, pid=5, command="load", model="m\nx", options=None, message="")
    audit.write("start")
    await audit.close()
    first, second = lines(path)
    assert first.pop("time").endswith("Z")
    assert first == {
        "act": "command",
        "uid": 0,
        "pid": 5,
        "command": "load",
        "model": "m\nx",
        "result": "not_found",
        "user": "root",
    }
    assert (second["act"], second["result"]) == ("start", "ok")
    assert path.stat().st_mode & 0o777 == 0o600
    assert audit.num_dropped == 0


async def test_it_is_added_to_and_opened_anew(tmp_path: Path) -> None:
    """The file is renamed and then hearthd is told, as logrotate does it."""
    path, other = tmp_path / "audit.log", tmp_path / "other.log"
    for at in range(2):
        audit = AuditLog()
        audit.use(str(path), False)
        audit.write("start", at=at)
        await audit.close()
    assert [act["at"] for act in lines(path)] == [0, 1]
    audit = AuditLog()
    audit.use(str(path), False)
    await audit.close()
    audit = AuditLog()
    audit.use(str(path), False)
    audit.write("one")
    audit.use(str(other), False)
    audit.write("two")
    audit.use("", False)
    audit.write("three")
    await audit.close()
    assert [act["act"] for act in lines(path)] == ["start", "start", "one"]
    assert [act["act"] for act in lines(other)] == ["two"]


async def test_a_full_disk_loses_acts_and_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, disk, audit = tmp_path / "audit.log", Disk(monkeypatch), AuditLog()
    disk.room, size = 100, len(json.dumps({"time": "2026-01-01T00:00:00.000Z", "act": "one", "result": "ok"})) + 1
    assert 1.1 * size < disk.room < 1.9 * size, "one line, and a part of the second"
    audit.use(str(path), False)
    audit.write("one")
    audit.write("two")
    audit.write("three")
    await wait_for(lambda: audit.num_dropped == 2 and audit.problem)
    assert f"audit_log {path}: No space left on device" in caplog.text
    assert "No space left on device" in audit.problem
    audit.write("four")
    await wait_for(lambda: audit.num_dropped == 3)
    audit.reopen()
    disk.room = None
    audit.write("five")
    await audit.close()
    text = path.read_text().splitlines()
    assert json.loads(text[0])["act"] == "one"
    assert not text[1].endswith("}"), "a part of a line stays, and the next line is whole"
    assert [json.loads(line)["act"] for line in text[2:]] == ["dropped", "five"]
    assert json.loads(text[2])["count"] == 3
    assert (audit.num_dropped, audit.problem) == (3, "")
    assert caplog.text.count("acts are dropped until") == 1


async def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def test_a_hanging_disk_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, disk, audit = tmp_path / "audit.log", Disk(monkeypatch), AuditLog(max_waiting=10)
    monkeypatch.setattr(audit_log, "CLOSE_S", 0.01)
    disk.go.clear()
    audit.use(str(path), False)
    audit.write("first")
    await wait_for(disk.reached.is_set)
    for _ in range(25):
        audit.write("more")
    assert audit.num_dropped == 15
    assert caplog.text.count("its disk is too slow") == 1
    await audit.close()
    assert "its disk hangs; 10 acts were not written" in caplog.text
    disk.go.set()
    thread = audit._thread
    assert thread is not None
    thread.join(60)
    assert [act["act"] for act in lines(path)] == ["first", "dropped", *(10 * ["more"])]


@pytest.mark.parametrize("ends", ["with the next act", "with the next reload", "at the stop"])
async def test_acts_wait_for_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    path, audit = tmp_path / "audit.log", AuditLog(max_waiting=5)
    problem = "audit_log has no thread that writes it: thread audit log: it did not begin within 1 s, as where no memory is left"
    with no_thread():
        audit.use(str(path), False)
        for _ in range(7):
            audit.write("waited")
        monkeypatch.setattr(audit_log, "THREAD_AGAIN_S", 0.0)
        audit.write("lost")
        assert audit.problems() == [f"{problem}; 4 acts were dropped"]
    assert caplog.text.count(f"{problem}; up to 5 acts wait for one") == 1
    assert caplog.text.count("acts dropped so far, for it has no thread that writes it") == 1
    if ends == "with the next act":
        audit.write("lost")
    elif ends == "with the next reload":
        audit.use(str(path), False)
    if ends != "at the stop":
        await wait_for(lambda: not audit.problem)
    await audit.close()
    assert [act["act"] for act in lines(path)] == ["dropped", *(4 * ["waited"])]
    assert lines(path)[0]["count"] == audit.num_dropped == 4 + (ends == "with the next act")


async def test_acts_that_no_thread_ever_wrote_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    audit = AuditLog()
    with no_thread():
        audit.use(str(tmp_path / "audit.log"), False)
        audit.write("start")
        audit.write("stop")
        await audit.close()
    assert "audit log: it has no thread that writes it; 2 acts were not written" in caplog.text


@pytest.mark.parametrize("where", ["folder", "missing/audit.log"])
async def test_a_file_that_cannot_be_opened_stops_nothing(tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").mkdir()
    audit = AuditLog()
    audit.use(str(tmp_path / where), False)
    await wait_for(lambda: audit.problem)
    audit.write("lost")
    await wait_for(lambda: audit.num_dropped == 1)
    assert caplog.text.count(f"audit_log {tmp_path / where}: ") == 1
    if "/" in where:
        (tmp_path / "missing").mkdir()
        audit.write("found")
        await wait_for(lambda: not audit.problem)
        assert [act["act"] for act in lines(tmp_path / where)] in (["found"], ["dropped", "found"])
    await audit.close()


@pytest.mark.parametrize("target", ["log", "journal"])
async def test_it_may_go_into_the_log(target: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("hearthd").setLevel("ERROR")
    audit = AuditLog()
    audit.use(target, False)
    audit.write("start", pid=5)
    await audit.close()
    (record,) = [record for record in caplog.records if record.name == "hearthd.audit"]
    assert json.loads(record.getMessage()) | {"time": ""} == {"time": "", "act": "start", "pid": 5, "result": "ok"}
    logging.getLogger("hearthd").setLevel("NOTSET")


async def test_strangers_cannot_fill_the_disk(tmp_path: Path) -> None:
    path, audit = tmp_path / "audit.log", AuditLog()
    audit.use(str(path), False)
    for _ in range(audit_log.REFUSALS_A_MINUTE + 30):
        audit.write_refusal("invalid_api_key", "key_refused", "invalid_api_key")
    audit.write_refusal("limit a", "limit_refused", "rate_limit_exceeded")
    await audit.close()
    acts = [act["act"] for act in lines(path)]
    assert acts.count("key_refused") == audit_log.REFUSALS_A_MINUTE
    assert acts[-2:] == ["limit_refused", "more_refused"], "each kind has its own share"
    assert (lines(path)[-1]["count"], lines(path)[-1]["result"]) == (30, "invalid_api_key")


def test_a_missing_folder_is_a_mistake(tmp_path: Path) -> None:
    for good in ("", "log", "journal", str(tmp_path / "audit.log")):
        audit_log.check(good, "node.toml")
    with pytest.raises(ConfigError, match=r"node\.toml: audit_log: .*/none/audit\.log: there is no folder .*/none"):
        audit_log.check(str(tmp_path / "none" / "audit.log"), "node.toml")
