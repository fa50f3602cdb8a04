"""Memory that is short: a control group in which it is used up again and again, and a limit on what one process may map.

The group holds the node and a process that fills it up and that the kernel ends first, which is what a unit with `MemoryMax=`
meets; nobody else on the machine goes short. Who may make no group can limit an engine, which needs no rights.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
# of version 1 and 2: where groups are, the name of that hierarchy in /proc/self/cgroup, and the file that limits memory
KINDS = ((GROUPS / "memory", "memory", "memory.limit_in_bytes"), (GROUPS, "", "memory.max"))
# Memory of the group that no process holds. A process with an oom_score_adj of 500 counts as if it held half the group besides,
# which has to be more than the daemon holds, as it is on any machine.
BALLAST_BYTES = 512 << 20
BALLAST = """
import sys
with open(sys.argv[1], "w") as file:
    file.write("0")
with open(int(sys.argv[2]), "wb", closefd=False) as file:
    for _ in range(int(sys.argv[3]) >> 20):
        file.write(bytes(1 << 20))
"""
FILLED_FIRST = """
import sys
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
with open(sys.argv[1], "w") as file:
    file.write("0")
held = []
while True:
    held.append(bytearray(b"x") * (1 << 20))
"""


class Groups:
    """Makes control groups of memory, below this process's own. Raises OSError if none can be made here."""

    def __init__(self) -> None:
        for top, hierarchy, limit in KINDS:
            own = _own(top, hierarchy)
            if (own / "cgroup.procs").exists() and _limits(own, limit):
                self._own, self._limit, self._numbers = own, limit, itertools.count(1)
                return
        raise OSError("no control group of memory can be made here")

    @contextlib.contextmanager
    def limited(self, num_bytes: int) -> Iterator[Path]:
        """A context in which this process and those that it starts may take num_bytes together. Yields the group's folder."""
        folder = self._make(num_bytes)
        try:
            _move(folder, [os.getpid()])
            yield folder
        finally:
            self._leave(folder)

    def _make(self, num_bytes: int) -> Path:
        folder = self._own / f"hearthd-chaos-{os.getpid()}-{next(self._numbers)}"
        folder.mkdir()
        (folder / self._limit).write_text(str(num_bytes))
        return folder

    @contextlib.contextmanager
    def short_of_memory(self, pids: Iterable[int], num_bytes: int) -> Iterator[None]:
        """A context in which these processes and their children share `num_bytes` more with one that takes all of them, over and
        over: the kernel ends it, and it begins again. The group is a new one: what was allocated in an earlier one counts there."""
        folder = self._make(BALLAST_BYTES + num_bytes)
        ballast = os.memfd_create("ballast")
        filling: subprocess.Popen[bytes] | None = None
        try:
            procs = str(folder / "cgroup.procs")
            weighing = [sys.executable, "-S", "-c", BALLAST, procs, str(ballast), str(BALLAST_BYTES)]
            subprocess.run(weighing, pass_fds=(ballast,), check=True)
            _move(folder, pids)
            filler = [sys.executable, "-S", "-c", FILLED_FIRST, procs]
            filling = subprocess.Popen(["sh", "-c", 'while :; do "$@"; done', "sh", *filler], stderr=subprocess.DEVNULL)
            yield
        finally:
            if filling is not None:
                filling.kill()
                filling.wait()
            os.close(ballast)
            self._leave(folder)

    def _leave(self, folder: Path) -> None:
        """Moves everybody back, ends the one that fills the group, and removes it."""
        (folder / self._limit).write_text(str(1 << 40))
        end = time.monotonic() + 30
        while True:
            members = [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
            for pid in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    if FILLED_FIRST in process.cmdline():
                        process.kill()
            _move(self._own, members)
            try:
                return folder.rmdir()
            except OSError:  # somebody is about to end, or was forked meanwhile
                assert time.monotonic() < end, f"{folder} cannot be removed; in it: {members}"
            time.sleep(0.02)


def _own(top: Path, hierarchy: str) -> Path:
    """Returns the folder of this process's group: the first one where a container shows no other."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if hierarchy in names.split(","):
            return top / path.lstrip("/") if (top / path.lstrip("/")).is_dir() else top
    return top


def _limits(group: Path, limit: str) -> bool:
    """Returns whether a group below this one has a limit that can be set."""
    folder = group / f"hearthd-try-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        return False
    found = os.access(folder / limit, os.W_OK)
    folder.rmdir()
    return found


def _move(folder: Path, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError), (folder / "cgroup.procs").open("w") as file:
            file.write(str(pid))


@contextlib.contextmanager
def no_more_mappings(process: psutil.Process) -> Iterator[None]:
    """A context in which the process is refused any further mapping."""
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_AS)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (process.memory_info().vms, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, hard))
