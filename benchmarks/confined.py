"""A process tree held to a part of a core, as far as this machine lets us."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

import psutil

GROUP = pathlib.Path("/sys/fs/cgroup/hearth-bench")
PERIOD_US = 100_000


def _threads(pid: int) -> list[int]:
    """Thread ids of a process and all below it."""
    found = []
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found += [thread.id for thread in process.threads()]
    return found


@contextlib.contextmanager
def confined(pid: int, share: float, with_groups: bool) -> Iterator[str]:
    """Yields how: a control group with `share` of a core, where we may make one (with_groups: and want to), else one whole core."""
    if with_groups and _make_group(share):
        parents = {}
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            parents[process.pid] = pathlib.Path(f"/proc/{process.pid}/cgroup").read_text().strip().rpartition("::")[2]
            (GROUP / "cgroup.procs").write_text(str(process.pid))
        try:
            yield f"{share:g} core, by control group"
        finally:
            for one, path in parents.items():
                with contextlib.suppress(OSError):
                    pathlib.Path(f"/sys/fs/cgroup{path}/cgroup.procs").write_text(str(one))
            with contextlib.suppress(OSError):
                GROUP.rmdir()
        return
    cores = os.sched_getaffinity(pid)
    for thread in _threads(pid):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, {min(cores)})
    try:
        yield "1 core, by affinity"
    finally:
        for thread in _threads(pid):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, cores)


def _make_group(share: float) -> bool:
    try:
        GROUP.mkdir(exist_ok=True)
        (GROUP / "cpu.max").write_text(f"{int(share * PERIOD_US)} {PERIOD_US}")
    except OSError:
        with contextlib.suppress(OSError):
            GROUP.rmdir()
        return False
    return True
