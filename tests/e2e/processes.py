"""Tells apart the processes below a daemon."""

from __future__ import annotations

import contextlib
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


def _those(pid: int, is_one: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ends just now
                if child.status() != psutil.STATUS_ZOMBIE and is_one(child):
                    found.append(child)
    return found
