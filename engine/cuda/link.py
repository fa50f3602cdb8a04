"""The base of the connections of a share of a split model to the other shares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loader.threads import Thread

log = logging.getLogger("engine")

CLOSE_LIMIT_S = 10.0  # for which `wait_closed` waits at most


class Link:
    """A connection of a share to other shares. _alone: whether nothing passes through it at the moment. _thread: the thread that
    uses the connection, and ends after `close`; None if the connection needs no thread. _fault: the error that ended this thread,
    None if there was none."""

    _alone = False
    _thread: Thread | None = None
    _fault: Exception | None = None

    def _begin(self, work: Callable[[], None], name: str) -> None:
        """Starts the thread, which runs `work`. An error of it is kept for `check_fault`, and then `_told_fault` is called."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._fault = error
                self._told_fault()

        self._thread = Thread(target=run, name=name)
        self._thread.start()

    def _told_fault(self) -> None:
        """Ends all waits, here and in other engines, for work that the thread would have done. Called in the thread, when an error
        has ended its work."""

    def has_ended(self) -> bool:
        """Returns whether the thread has done all that it was given. Does not wait. Raises as `check_fault` does."""
        self.check_fault()
        return True

    def check_fault(self) -> None:
        """Raises the error that has ended the thread, if there was one. A device reports its errors at any later call, and the
        thread's may be the only one that meets them."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Ends the thread. Subclasses say what ends before that. Idempotent."""
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
        """Waits after `close` until the thread has ended, and with it the use of all memory that is shared, for at most
        CLOSE_LIMIT_S. The device must be able to end its steps, and graphs with exchanges must have been destroyed."""
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)
            if self._thread.is_alive():
                log.error("a connection of a split model was not given up within %.0f s", CLOSE_LIMIT_S)
