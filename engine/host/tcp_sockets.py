"""Finds all TCP sockets of this process, also those that libraries have opened, and shuts them down."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

_FOLDER = "/proc/self/fd"


def tcp_sockets() -> frozenset[int]:
    """Returns the inodes of this process's TCP sockets."""
    return frozenset(inode for inode, _ in _sockets())


def shut_down(but: frozenset[int]) -> None:
    """Shuts down this process's TCP sockets, except those whose inodes are in `but`, so that threads that wait at these sockets get
    an error. It does not close the descriptors, because the code that opened them may still use them."""
    for inode, each in _sockets():
        if inode not in but:
            with contextlib.suppress(OSError):  # it is not connected yet
                each.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yields (inode, duplicate) for each TCP socket of this process. The duplicate is closed before the next one is yielded."""
    for name in os.listdir(_FOLDER):
        try:
            if not stat.S_ISSOCK(os.stat(f"{_FOLDER}/{name}").st_mode):
                continue
            number = os.dup(int(name))  # the descriptor may become another file's at any time, its copy may not
        except OSError:  # another thread has closed it
            continue
        try:
            copy = socket.socket(fileno=number)
        except OSError:  # another thread has closed the socket, and the number is another file's already
            os.close(number)
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                yield os.fstat(copy.fileno()).st_ino, copy
