"""Handles the limit on a process's open descriptors (RLIMIT_NOFILE), and the errors that tell that it is reached."""

from __future__ import annotations

import contextlib
import errno
import resource


def raise_limit() -> int:
    """Raises the soft limit to the hard limit and returns it. The soft limit is 1024 by convention, for programs that use
    select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # the kernel now allows less than the hard limit: the soft limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return limit()


def limit() -> int:
    """Returns the soft limit; if there is none, a larger number than any process needs (2^30)."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def are_used_up(error: OSError) -> bool:
    """Returns whether a call failed because this process or the whole system has as many files open as it may."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
