"""Prepares the daemon's child processes: gives them an environment in which Python finds hearthd's packages, limits their memory,
and makes the system's kernel kill them before the daemon when memory runs out."""

from __future__ import annotations

import os
import resource
from pathlib import Path

# Processes that compile kernels (kernel_builds.py of engine/cpu and engine/cuda): how many run at a time, and the memory of each
# (1,099 MiB were measured for two on cpu, 343 for one on cuda). More than four gain nothing: the longest unit takes as long as all
# the others do in four processes.
MOST_COMPILERS, COMPILER_BYTES = 4, 640 << 20
# How much higher the oom_score_adj of the daemon's children is than its own. The unit gives the daemon -500, so engines have 0, as
# other processes of the machine do.
OOM_SCORE_ADJ_OVER_DAEMON = 500
PACKAGES = Path(__file__).resolve().parents[2]  # the folder that contains the five packages


def child_environment(**more: str) -> dict[str, str]:
    """Returns the environment variables for a child process: those of this process, changed so that `python -P -m PACKAGE` finds
    hearthd's packages from any folder. For that the folder of the packages is put before this process's own PYTHONPATH, whose
    folders become absolute paths. more: variables that replace all others of the same names."""
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGES), *given]), **more}


def malloc_tunables(**values: int) -> str:
    """Returns a value of the environment variable GLIBC_TUNABLES for a child process. It is this process's own value, with the
    given tunables of glibc's malloc added unless that value already sets them. values: name -> value of each tunable."""
    given = os.environ.get("GLIBC_TUNABLES", "")
    ours = (f"glibc.malloc.{name}={value}" for name, value in values.items() if f".{name}=" not in given)
    return ":".join(filter(None, (given, *ours)))


def limit_memory(num_bytes: int, oom_score_adj: int) -> None:
    """Limits this process to `num_bytes` of address space, or to an inherited hard limit if that is lower. Raises this process's
    `oom_score_adj` to at least the given value: when memory runs out, the kernel kills processes with a higher value first."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(hard, num_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    _raise_oom_score_adj(os.getpid(), oom_score_adj)


def end_before_daemon(pid: int) -> None:
    """Makes the system's kernel kill a child of the daemon, and the processes that the child starts, before the daemon when memory
    runs out: an ended engine is started again and its requests go on, while the daemon's end cuts all connections. The daemon calls
    this for a new child, so that it also covers the child's first allocations."""
    own = int(Path("/proc/self/oom_score_adj").read_text())
    _raise_oom_score_adj(pid, min(1000, own + OOM_SCORE_ADJ_OVER_DAEMON))


def _raise_oom_score_adj(pid: int, value: int) -> None:
    """Raises the oom_score_adj of a process to `value`; when memory runs out, the kernel kills processes with a higher score first.
    Does nothing if the score is higher already, or if the process has ended."""
    file = Path(f"/proc/{pid}/oom_score_adj")
    try:
        if int(file.read_text()) < value:
            file.write_text(str(value))
    except OSError:
        pass
