"""Ends an engine process that hangs after its daemon has ended.

An engine may hang: if memory is short, a new thread may fail to begin, and threading.Thread.start then waits for ever; or a call of
a GPU's driver may not return. The daemon ends an engine that gives no sign of life, but once the daemon is gone, no other process
would."""

from __future__ import annotations

import os
import select
import time

from loader.threads import Thread

NOTICED_WITHIN_S = 5.0  # an engine that does not hang ends with its next step
EXIT_ORPHAN = 71


def end_with(socket_fd: int) -> None:
    """Starts a thread that ends this process, with exit code EXIT_ORPHAN, NOTICED_WITHIN_S seconds after the other end of a socket
    is closed. socket_fd: the socket to the daemon; the thread does not close it."""
    Thread(target=_watch, args=(socket_fd,), name="orphan").start()


def _watch(socket_fd: int) -> None:
    try:
        closed = select.poll()
        closed.register(socket_fd, 0)  # a hang-up is always reported; no other event is wanted
        closed.poll()
        time.sleep(NOTICED_WITHIN_S)
    finally:
        os._exit(EXIT_ORPHAN)
