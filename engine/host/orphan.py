"""Ends an engine process that hangs after its daemon is gone.

An engine may hang: a thread that fails to begin for lack of memory keeps the thread that starts it waiting for ever
(threading.Thread.start), and a driver's call may not return. While the daemon lives, it ends an engine that gives no sign of life;
without the daemon nobody would."""

from __future__ import annotations

import os
import select
import time

from loader.threads import Thread

NOTICED_WITHIN_S = 5.0  # an engine that does not hang ends with its next step
EXIT_ORPHAN = 71


def end_with(socket_fd: int) -> None:
    """Starts a thread that ends this process, with exit code EXIT_ORPHAN, NOTICED_WITHIN_S seconds after the other end of a socket
    was closed. The thread does not close the socket."""
    Thread(target=_watch, args=(socket_fd,), name="orphan").start()


def _watch(socket_fd: int) -> None:
    try:
        closed = select.poll()
        closed.register(socket_fd, 0)  # a hang-up is always reported; no other event is wanted
        closed.poll()
        time.sleep(NOTICED_WITHIN_S)
    finally:
        os._exit(EXIT_ORPHAN)
