"""How many descriptors a process may have open (RLIMIT_NOFILE), and the errors that say there are no more."""

from __future__ import annotations

import contextlib
import errno
import resource


def raise_limit() -> int:
    """Raises the soft limit to the hard one and returns it. The soft one is 1024 by custom, for programs that use select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # above what the kernel allows now: the soft limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return limit()


def limit() -> int:
    """The soft limit; a number beyond all others where there is none."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def are_used_up(error: OSError) -> bool:
    """Whether a call failed because this process, or the system, may open no more files."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
