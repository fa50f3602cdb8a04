"""Ends a command that waits when the reader of its output, such as head or a pager, has closed the pipe."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_without_reader() -> Iterator[None]:
    """Returns a context manager that raises KeyboardInterrupt in its block as soon as nobody can read standard output any more. It
    must be used in the main thread, which handles the signal that interrupts the block.

    A write would notice that, too, but a command that waits may have nothing to write for hours. So another thread waits for an
    error of the pipe."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # an object in this process collects what is printed
        yield
        return
    told_end, end = os.pipe()
    main_thread = threading.get_ident()

    def watch() -> None:
        poll = select.poll()
        poll.register(output, 0)  # an error or a hang-up is told whatever is asked for
        poll.register(told_end, 0)
        if all(fd != told_end for fd, _ in poll.poll()):
            signal.pthread_kill(main_thread, signal.SIGUSR1)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    thread = threading.Thread(target=watch, name="reader of the output", daemon=True)
    before = signal.signal(signal.SIGUSR1, interrupt)
    thread.start()
    try:
        yield
    finally:
        os.close(end)
        thread.join()
        signal.signal(signal.SIGUSR1, before)
        os.close(told_end)
