"""Defines the base class of the connections between the devices' shares of a split model (tensor or pipeline parallelism)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loader.threads import Thread

log = logging.getLogger("engine")

CLOSE_LIMIT_S = 10.0  # for which `wait_closed` waits at most


class Link:
    """The base class of a connection from one device's share of a split model to other shares. _alone: whether no data passes
    through the connection at the moment (see `alone`). _thread: the thread that uses the connection until `close`; None: it needs
    no thread. _writes_shared: whether this thread writes to the split model's region. _fault: the error that ended this thread;
    None: there was none."""

    _alone = False
    _writes_shared = True
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
        """Called in the connection's thread after an error has ended its work. A subclass overrides this to end the waits, in this
        engine and in others, for work that the thread has not done."""

    def has_ended(self) -> bool:
        """Returns, without waiting, whether the thread has done all work that it was given. Raises the error that has ended the
        thread, if there was one."""
        self.check_fault()
        return True

    def check_fault(self) -> None:
        """Raises the error that has ended the thread, if there was one. The error may concern the whole device, because a device
        reports an error at whatever call comes next, in any thread."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Ends the thread. Each subclass says what the thread still does before it ends. Idempotent."""
        raise NotImplementedError

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Returns a context in which no data passes through the connection, for steps that only compile kernels or allocate memory.
        Only the thread that runs steps, or the one that makes the model, may enter it, and it must run no other step inside."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def wait_closed(self) -> None:
        """Waits, after `close`, until the thread has ended and no longer uses shared memory. Gives up after CLOSE_LIMIT_S. It then
        raises RuntimeError if the thread writes to the region, which another split model may get once this one has left; only the
        process's end makes that safe. Else it only logs that. Before the call, graphs with exchanges must have been destroyed, and
        nothing may keep the device from ending its steps."""
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)
            if self._thread.is_alive():
                text = f"a connection of a split model was not given up within {CLOSE_LIMIT_S:.0f} s"
                if self._writes_shared:
                    raise RuntimeError(text)
                log.error("%s", text)
