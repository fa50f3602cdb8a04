"""Defines threads whose `start` returns or raises within a bounded time, even if there is no memory left for the thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

START_LIMIT_S = 20.0  # a thread that is there may take so long to begin on a machine with too much to do
UNSEEN_LIMIT_S = 1.0  # where the process's threads cannot be listed
_LOOK_EVERY_S = 0.05


class Thread(threading.Thread):
    """A daemon thread, for whose end the process does not wait when it exits. `start` raises MemoryError if there is no memory for
    the thread; its target is never called then.

    threading.Thread.start waits until the new thread signals that it runs. A thread that lacks the memory to do so ends without a
    signal, and that wait never ends (https://github.com/python/cpython/issues/140746). `start` recognises this case because the
    system no longer lists such a thread, while it lists one that only waits for a processor."""

    def __init__(self, target: Callable[..., object], args: Iterable[Any] = (), name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self._work: tuple[Callable[..., object], Iterable[Any]] | None = (target, args)
        self._started = _Unawaited()  # the event that threading.Thread.start waits for
        self._claim = threading.Lock()  # taken once: by the thread as it begins, or by a start that has given up
        self._begun = threading.Lock()
        self._begun.acquire()

    def start(self) -> None:
        before, began_s = _threads(), time.monotonic()
        try:
            super().start()
        except RuntimeError as error:
            raise MemoryError(f"thread {self.name}: {error}") from None
        while not self._begun.acquire(timeout=min(_LOOK_EVERY_S, START_LIMIT_S)):
            waited_s, limit_s, now = time.monotonic() - began_s, START_LIMIT_S, _threads()
            if before is None or now is None:
                limit_s = UNSEEN_LIMIT_S
            elif now <= before:  # it has ended
                limit_s = 0.0
            if waited_s >= limit_s and self._claim.acquire(blocking=False):
                self._work = None  # the interpreter may keep this object for ever, because it does not know that there is no thread
                raise MemoryError(f"thread {self.name}: it did not begin within {waited_s:.2g} s, as where no memory is left")

    def run(self) -> None:
        if self._claim.acquire(blocking=False):
            self._begun.release()
            assert self._work is not None
            (target, args), self._work = self._work, None
            target(*args)


class _Unawaited(threading.Event):
    """An event whose `wait` returns at once, so that threading.Thread.start, which uses it, does not wait until the new thread
    signals that it runs."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


def _threads() -> set[str] | None:
    """Returns the system's ids of all threads of this process; None if there is no memory to list them."""
    try:
        return set(os.listdir("/proc/self/task"))
    except (OSError, MemoryError):
        return None
