"""Shares places in service fairly among tenants: the tenant with the fewest requests in service in proportion to its weight is
served next.

Only requests in service count, and no history is kept. A tenant that floods a queue therefore waits behind its own requests, and a
tenant with long requests gets no more places than others.
"""

from __future__ import annotations

from collections.abc import Iterable


class Shares:
    def __init__(self) -> None:
        self.active: dict[str, int] = {}  # tenant -> requests in service
        self._weights: dict[str, float] = {}  # tenant with requests in service -> its weight

    def start(self, tenant: str, weight: float) -> None:
        self.active[tenant] = self.active.get(tenant, 0) + 1
        self._weights[tenant] = weight

    def stop(self, tenant: str) -> None:
        left = self.active[tenant] - 1
        if left:
            self.active[tenant] = left
        else:
            del self.active[tenant], self._weights[tenant]

    def least(self, waiting: Iterable[tuple[str, float, int]]) -> str:
        """Returns the tenant to serve next: the one with the fewest requests in service in proportion to its weight, and among
        equal tenants the one with the oldest request. waiting: for each waiting tenant (tenant, weight, order of its first
        request); at least one. O(tenants)."""
        active = self.active
        return min(waiting, key=lambda each: ((active.get(each[0], 0) + 1) / each[1], each[2]))[0]

    def crowding(self) -> str | None:
        """Returns the tenant with the most requests in service in proportion to its weight, among tenants that have more than one
        in service; None if there is none, or if only one tenant is in service."""
        several = [tenant for tenant, number in self.active.items() if number > 1] if len(self.active) > 1 else []
        return max(several, key=lambda tenant: self.active[tenant] / self._weights[tenant], default=None)
