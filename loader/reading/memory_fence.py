"""Orders the accesses of a thread to memory that several processes share."""

from __future__ import annotations

import threading


class MemoryFence:
    """A memory fence for the accesses of one thread, which works on every kind of processor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def order(self) -> None:
        """Makes all memory accesses before this call happen before all accesses after it. It releases a lock (a store with release
        semantics) and takes it again (a load with acquire semantics that reads this store)."""
        self._lock.release()
        self._lock.acquire()
