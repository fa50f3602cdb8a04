"""Defines the base class of the connections between the devices' shares of a split model (tensor or pipeline parallelism)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loader.threads import Thread

log = logging.getLogger("engine")

CLOSE_LIMIT_S = 10.0  # for which `wait_closed` waits at most


class Link:
    """A connection of one device's share of a split model to other shares. _alone: whether nothing passes through it at the moment
    (see `alone`). _thread: the thread that uses the connection, and ends after `close`; None if the connection needs no thread.
    _fault: the error that ended this thread; None if there was none."""

    _alone = False
    _thread: Thread | None = None
    _fault: Exception | None = None

    def _begin(self, work: Callable[[], None], name: str) -> None:
        """Starts the connection's thread, which runs `work`. If `work` raises, the error is kept for `check_fault`, and
        `_told_fault` is called."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._fault = error
                self._told_fault()

        self._thread = Thread(target=run, name=name)
        self._thread.start()

    def _told_fault(self) -> None:
        """Ends all waits, in this engine and in others, for what the thread would have done. Called in the thread after an error
        has ended its work. Does nothing unless a subclass overrides it."""

    def has_ended(self) -> bool:
        """Returns whether the thread has done all that it was given. Does not wait. Raises the error that has ended the thread, if
        there was one."""
        self.check_fault()
        return True

    def check_fault(self) -> None:
        """Raises the error that has ended the thread, if there was one. A device reports its errors at any later call, which may be
        one of the thread's alone."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Ends the thread. Subclasses say what is done before that. Idempotent."""
        raise NotImplementedError

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Returns a context in which nothing passes through the connection, for steps that only compile kernels or allocate memory.
        Only the thread that runs steps, or that makes the model, may use it, and it must run no other step within."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def wait_closed(self) -> None:
        """Waits, after `close`, until the thread has ended, and with it the use of all shared memory; gives up after CLOSE_LIMIT_S
        with an error in the log. Before the call, graphs with exchanges must have been destroyed, and nothing may keep the device
        from ending its steps."""
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)
            if self._thread.is_alive():
                log.error("a connection of a split model was not given up within %.0f s", CLOSE_LIMIT_S)
