"""Ends this process when its daemon is gone and it has not noticed itself.

A thread that fails to begin for want of memory keeps the thread that starts it waiting for ever (threading.Thread.start), and a
driver's call may not return. While the daemon lives, it ends an engine that gives no sign of life; afterwards nobody would."""

from __future__ import annotations

import os
import select
import threading
import time

NOTICED_WITHIN_S = 5.0  # an engine that is well ends with its next step
EXIT_ORPHAN = 71


def end_with(socket_fd: int) -> None:
    """Starts a thread that ends the process some seconds after the other end of a socket is closed. The socket stays open here."""
    threading.Thread(target=_watch, args=(socket_fd,), name="orphan", daemon=True).start()


def _watch(socket_fd: int) -> None:
    try:
        closed = select.poll()
        closed.register(socket_fd, 0)  # a hang-up is reported unasked, and nothing else should be
        closed.poll()
        time.sleep(NOTICED_WITHIN_S)
    finally:
        os._exit(EXIT_ORPHAN)
