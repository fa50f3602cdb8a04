"""Reads and raises the limit on a process's open descriptors (RLIMIT_NOFILE), and recognises the errors of calls that exceed it."""

from __future__ import annotations

import contextlib
import errno
import resource


def raise_limit() -> int:
    """Raises this process's soft limit of open descriptors to the hard limit, and returns the soft limit that is then valid.
    Systems usually start processes with a soft limit of 1024, the most descriptors that select(2) supports."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # the kernel now allows less than the hard limit: the soft limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return limit()


def limit() -> int:
    """Returns this process's soft limit of open descriptors; 2^30, more than any process needs, if the process has no limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def are_used_up(error: OSError) -> bool:
    """Returns whether a call failed because this process, or the whole system, has reached the limit of open files."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
