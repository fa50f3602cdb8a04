"""Orders a thread's accesses to memory that several processes share."""

from __future__ import annotations

import threading


class MemoryFence:
    """A memory fence for the accesses of one thread, which works on every kind of processor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def order(self) -> None:
        """Orders all accesses before this call before all accesses after it: releasing a lock and taking it again are a store with
        release semantics and a load with acquire semantics that reads it."""
        self._lock.release()
        self._lock.acquire()
