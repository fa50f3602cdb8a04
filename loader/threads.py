"""Threads whose `start` returns or raises within a bounded time, even if there is no memory left for the thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

START_LIMIT_S = 1.0


class Thread(threading.Thread):
    """A thread that the process does not wait for at its end. `start` raises MemoryError if there is no memory for the thread; its
    target is never called then.

    threading.Thread.start waits for the first sign of the new thread, and waits for ever where that thread has no memory to give
    one, as in a process that may map no more (https://github.com/python/cpython/issues/140746; found with engines)."""

    def __init__(self, target: Callable[..., object], args: Iterable[Any] = (), name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self._work: tuple[Callable[..., object], Iterable[Any]] | None = (target, args)
        self._started = _Unawaited()  # the event that threading.Thread.start waits for
        self._claim = threading.Lock()  # taken once: by the thread as it begins, or by a start that has given up
        self._begun = threading.Lock()
        self._begun.acquire()

    def start(self) -> None:
        try:
            super().start()
        except RuntimeError as error:
            raise MemoryError(f"thread {self.name}: {error}") from None
        if not self._begun.acquire(timeout=START_LIMIT_S) and self._claim.acquire(blocking=False):
            self._work = None  # the interpreter may keep this object for ever, because it does not know that there is no thread
            raise MemoryError(f"thread {self.name}: it did not begin within {START_LIMIT_S:g} s, as where no memory is left")

    def run(self) -> None:
        if self._claim.acquire(blocking=False):
            self._begun.release()
            assert self._work is not None
            (target, args), self._work = self._work, None
            target(*args)


class _Unawaited(threading.Event):
    """An event whose `wait` returns at once, so that threading.Thread.start does not wait for its thread's first sign."""

    def wait(self, timeout: float | None = None) -> bool:
        return True
