"""What the daemon prepares before any of its parts runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config.schema import DeviceBudget, ModelConfig, NodeConfig
from daemon import lifecycle
from daemon.operate.named_files import NamedFiles
from daemon.process import file_watch


@pytest.fixture
def as_before() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("as_before")
def test_work_beside_the_loop_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start might hang the loop where memory has run out."""
    seen: list[set[threading.Thread]] = []

    class Run:
        def __init__(self, *about: Any) -> None: ...

        async def run(self) -> int:
            seen.append(set(threading.enumerate()))
            seen.append(set(await asyncio.gather(*(asyncio.to_thread(threading.current_thread) for _ in range(100)))))
            seen.append(set(threading.enumerate()))
            return 0

    monkeypatch.setattr(lifecycle, "DaemonRun", Run)
    assert lifecycle.serve(NodeConfig(), [], None, {}, NamedFiles(None, None, {}, {})) == 0
    before, used, after = seen
    assert used <= before == after


@pytest.mark.usefixtures("as_before")
def test_calls_that_a_dead_disk_and_a_dead_driver_keep_leave_threads_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a time one call for each engine may hang, and one of each other kind."""
    ends = threading.Event()

    class Run:
        def __init__(self, *about: Any) -> None: ...

        async def run(self) -> int:
            loop = asyncio.get_running_loop()
            hung = [loop.run_in_executor(None, ends.wait) for _ in range(lifecycle.MAY_HANG + 3)]
            try:
                async with asyncio.timeout(10):
                    await asyncio.to_thread(int)
            finally:
                ends.set()
            await asyncio.gather(*hung)
            return 0

    monkeypatch.setattr(lifecycle, "DaemonRun", Run)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    config = NodeConfig(models={"alone": ModelConfig(isolate=True), "other": ModelConfig()})
    devices = [DeviceBudget(name, 1 << 30) for name in ("cpu:0", "cpu:1")]
    assert lifecycle.serve(config, devices, None, {}, NamedFiles(None, None, {}, {})) == 0


async def test_a_reload_goes_on_without_who_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on, is_done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def reload(run: lifecycle.DaemonRun) -> dict[str, Any]:
        begun.set()
        await may_go_on.wait()
        is_done.set()
        return {}

    monkeypatch.setattr(lifecycle.DaemonRun, "reload", reload)
    run = lifecycle.DaemonRun(NodeConfig(), [], None, {}, NamedFiles(None, None, {}, {}))
    asked = asyncio.ensure_future(run.reload_as_asked())
    await begun.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    may_go_on.set()
    async with asyncio.timeout(10):
        await is_done.wait()


NO_MEMORY_FOR_A_THREAD = """
import asyncio, resource
from config.schema import NodeConfig
from daemon import lifecycle
from daemon.operate.named_files import NamedFiles

class Run:
    def __init__(self, *about): ...

    async def run(self):
        with open("/proc/self/statm") as file:
            size_bytes = int(file.read().split()[0]) * resource.getpagesize()
        # Room for some objects, because Python itself may crash where an allocation fails, but for no thread: its stack has 2 MiB
        # at least.
        limit_bytes = size_bytes + (1536 << 10)
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        await asyncio.gather(*(asyncio.to_thread(int) for _ in range(100)))
        return 0

lifecycle.DaemonRun = Run
raise SystemExit(lifecycle.serve(NodeConfig(), [], None, {}, NamedFiles(None, None, {}, {})))
"""


def test_a_daemon_without_memory_for_a_thread_works_on_and_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", NO_MEMORY_FOR_A_THREAD], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


HUNG_CALL = """
import asyncio, os, sys
from config.schema import NodeConfig
from daemon import lifecycle
from daemon.operate.named_files import NamedFiles

class Run:
    def __init__(self, *about): ...

    async def run(self):
        asyncio.get_running_loop().run_in_executor(None, os.open, sys.argv[1], os.O_WRONLY)
        return 0

lifecycle.WORK_END_S = 0.2
lifecycle.DaemonRun = Run
raise SystemExit(lifecycle.serve(NodeConfig(), [], None, {}, NamedFiles(None, None, {}, {})))
"""


def test_a_call_that_never_returns_does_not_keep_the_daemon_from_ending(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hangs")  # opening it waits for a reader
    command = [sys.executable, "-c", HUNG_CALL, str(tmp_path / "hangs")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    told = "calls of a disk, a driver or another process that do not return: 1; hearthd ends without them\n"
    assert (ended.returncode, ended.stderr) == (0, told)


async def test_a_file_that_is_being_written_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is empty for a moment if it is written in place, and then half of it is there."""
    monkeypatch.setattr(file_watch, "PAUSE_S", 0.0)
    run = lifecycle.DaemonRun(NodeConfig(), [], None, {}, NamedFiles(None, None, {}, {}))
    looks, read = ["", "half", "whole"], list[str]()
    content = "before"

    def present() -> str:
        nonlocal content
        content = looks.pop(0) if looks else content
        return content

    async def nothing() -> None:
        pass

    async def reload() -> None:
        read.append(content)

    for name, stand_in in {"_present": present, "_follow_files": nothing, "_reload_logged": reload}.items():
        monkeypatch.setattr(run, name, stand_in)
    run._read = "before"  # type: ignore[assignment]
    await run._reload_changed()
    assert read == ["whole"]
