"""What a child process of ours needs: to find the packages from `/`, where it runs, and a limit of its memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

# Processes that compile kernels (engine/kernel_builds.py): how many at a time, for the longest unit takes as long as all others in
# four, and what each takes (1,099 MiB were measured of two).
MOST_COMPILERS, COMPILER_BYTES = 4, 640 << 20
PACKAGES = Path(__file__).resolve().parent.parent  # the folder that holds the five packages


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment, in which `python -P -m PACKAGE` finds these packages from any folder, and what this process was
    given to find others; `more` wins."""
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGES), *given]), **more}


def limit_memory(num_bytes: int, oom_score_adj: int) -> None:
    """Limits this process to `num_bytes` of address space, and less where a limit was inherited, and has the kernel end it before
    processes with a lower `oom_score_adj` when the machine's memory runs out."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(hard, num_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(oom_score_adj))
    except OSError:
        pass  # it was higher already, and may not be lowered
