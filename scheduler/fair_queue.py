"""Implements start-time fair queueing (Goyal, Vin, Cheng 1996): the tenant with the least work done in proportion to its weight is
served next.

It serves whole requests, one after the other, and counts the work done for each tenant. (`Shares` in scheduler/shares.py counts
requests in service instead.) A tenant that had nothing waiting starts level with the others: it has neither credit nor debt.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass

FORGET_ABOVE = 256  # tenants remembered though they wait for nothing


@dataclass(slots=True, frozen=True)
class _Entry:
    tenant: str
    order: int
    weighted_size: float


class FairQueue:
    """A queue of waiting requests. The next request is one of the tenant for whom the least work was done in proportion to its
    weight; of this tenant's requests it is the one with the highest priority, and among equal priorities the oldest. Work is the
    sum of the sizes that the caller gave to `add` for the requests that were taken. A tenant that had nothing waiting starts level
    with the others."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._heaps: dict[str, list[tuple[int, int, int]]] = {}  # tenant that waits -> (-priority, order, request id)
        self._served: dict[str, float] = {}  # tenant -> the virtual start time of its next request
        self._level = 0.0  # the virtual start time of the request that was served last
        self._order = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request_id: int, size: float, tenant: str = "", weight: float = 1.0, priority: int = 0) -> None:
        """Queues a request. size: the work it takes, in a unit that is the same for all requests, such as tokens. weight: the
        tenant's weight, above 0; the work done for tenants is kept in proportion to their weights. priority: among requests of one
        tenant the highest comes first."""
        if tenant not in self._heaps:
            self._heaps[tenant] = []
            self._served[tenant] = max(self._level, self._served.get(tenant, 0.0))
            if len(self._served) > FORGET_ABOVE + len(self._heaps):
                self._served = {name: at for name, at in self._served.items() if at > self._level or name in self._heaps}
        self._order += 1
        self._entries[request_id] = _Entry(tenant, self._order, size / weight)
        heapq.heappush(self._heaps[tenant], (-priority, self._order, request_id))

    def first(self, without: Container[str] = ()) -> int | None:
        """Returns the id of the next request without removing it; None if none waits. without: tenants whose requests are skipped.
        O(waiting tenants)."""
        waiting = [
            (self._served[tenant], first)
            for tenant in list(self._heaps)
            if tenant not in without and (first := self._first(tenant)) is not None
        ]
        return min(waiting, key=lambda each: (each[0], each[1][1]))[1][2] if waiting else None

    def take(self, request_id: int) -> None:
        """Removes a request because it is served now, and counts its size as work done for its tenant. Raises KeyError if it does
        not wait."""
        entry = self._entries.pop(request_id)
        self._level = self._served[entry.tenant]
        self._served[entry.tenant] += entry.weighted_size
        self._first(entry.tenant)

    def charge(self, tenant: str, size: float, weight: float = 1.0) -> None:
        """Counts work as done for a tenant, if its size was not known when its request was added (with size 0) and taken."""
        self._served[tenant] = self._served.get(tenant, self._level) + size / weight

    def withdraw(self, request_id: int) -> bool:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        self._first(entry.tenant)
        return True

    def _first(self, tenant: str) -> tuple[int, int, int] | None:
        """Returns (-priority, order, request id) of the tenant's next request. If the tenant has no waiting request, removes the
        tenant's heap and returns None."""
        heap = self._heaps[tenant]
        while heap:
            _, order, request_id = heap[0]
            entry = self._entries.get(request_id)
            if entry is not None and entry.order == order:
                return heap[0]
            heapq.heappop(heap)
        del self._heaps[tenant]
        return None
