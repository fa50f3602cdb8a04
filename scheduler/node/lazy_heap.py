"""Implements a priority queue in which a key's priority can be changed and a key removed: a heap that keeps stale entries until
they reach the top."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

K = TypeVar("K")


class LazyHeap(Generic[K]):
    """A priority queue of keys, the smallest priority first, ties by key. Every operation is O(log n), amortised: stale entries are
    removed when they outnumber the live ones."""

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[float, Any]] = []
        self._live: dict[K, float] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    def get(self, key: K) -> float | None:
        return self._live.get(key)

    def set(self, key: K, priority: float) -> None:
        """Inserts the key with this priority, or changes the priority of a key that it already has."""
        live = self._live
        if live.get(key) == priority:
            return
        live[key] = priority
        heap = self._heap
        heappush(heap, (priority, key))
        if len(heap) > 2 * len(live) + 64:
            heap[:] = [(p, k) for k, p in live.items()]
            heapify(heap)

    def discard(self, key: K) -> None:
        self._live.pop(key, None)

    def peek(self) -> tuple[float, K] | None:
        heap, live = self._heap, self._live
        while heap:
            priority, key = heap[0]
            if live.get(key) == priority:
                return priority, key
            heappop(heap)
        return None

    def pop_due(self, now: float) -> K | None:
        """Removes and returns the first key if its priority is at most `now`, else returns None."""
        first = self.peek()
        if first is None or first[0] > now:
            return None
        heappop(self._heap)
        del self._live[first[1]]
        return first[1]

    def smallest(self, num: int) -> list[K]:
        """Returns the `num` keys of the smallest priorities, in order, or all if there are fewer; they stay in the heap."""
        heap, live = self._heap, self._live
        taken: dict[K, tuple[float, K]] = {}
        while heap and len(taken) < num:
            priority, key = heappop(heap)
            if live.get(key) == priority:
                taken[key] = (priority, key)
        for entry in taken.values():
            heappush(heap, entry)
        return list(taken)

    def keys(self) -> list[K]:
        """Returns all keys in the heap, in no order."""
        return list(self._live)
