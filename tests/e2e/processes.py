"""Tells apart the processes below a daemon, and measures what they compute."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def engines(pid: int) -> list[psutil.Process]:
    """Returns the living engines of the daemon with this process id."""
    return _those(pid, lambda process: process.name().startswith("engine "))


def fork_servers(pid: int) -> list[psutil.Process]:
    return _those(pid, lambda process: process.name() == "fork server")


def with_word(pid: int, word: str) -> list[psutil.Process]:
    """Returns the living processes below this one whose command line has this word."""
    return _those(pid, lambda process: word in process.cmdline())


def anonymous_bytes(pid: int) -> int:
    """Returns a process's resident memory without files and shared memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon:")).split()[1]) << 10


class Spent:
    """Measures what a daemon spends on what it does for this thread, on a machine on which others compute, too. pid: of the daemon.
    It begins when it is made."""

    def __init__(self, pid: int) -> None:
        self._pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        self._before = {one: _run_and_waited_s(one) for one in self._tasks()}
        self._begin_s = time.monotonic()

    def computed_s(self) -> float:
        """Returns the seconds that the daemon, its engines and its text workers have computed since the beginning."""
        after = {one: _run_and_waited_s(one)[0] for one in self._tasks() if one.parts[2] != "self"}
        return sum(max(0.0, run_s - self._before.get(one, (0.0, 0.0))[0]) for one, run_s in after.items())

    def unhindered_s(self) -> float:
        """Returns the seconds since the beginning, without those for which this thread, or the first one of the daemon, an engine
        or a text worker, could not run because others did. Where two wait at once, both waits are left out: on a machine with
        nothing else to do this is the time by the clock, on others it may be less."""
        took_s = time.monotonic() - self._begin_s
        firsts = [path for path in self._before if path.parts[2] in ("self", path.name)]
        return took_s - sum(max(0.0, _run_and_waited_s(one)[1] - self._before[one][1]) for one in firsts)

    def _tasks(self) -> list[Path]:
        """Returns the folders of the threads of the processes, and of this thread."""
        found = [Path(f"/proc/self/task/{threading.get_native_id()}")]
        for pid in self._pids:
            with contextlib.suppress(OSError):
                found += Path(f"/proc/{pid}/task").iterdir()
        return found


def _run_and_waited_s(task: Path) -> tuple[float, float]:
    """Returns for how long a thread has run so far, and for how long it has waited for a processor; zeros if it has ended."""
    with contextlib.suppress(OSError):
        run_ns, waited_ns, _ = (task / "schedstat").read_text().split()
        return int(run_ns) / 1e9, int(waited_ns) / 1e9
    return 0.0, 0.0


def _those(pid: int, is_one: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ends just now
                if child.status() != psutil.STATUS_ZOMBIE and is_one(child):
                    found.append(child)
    return found
