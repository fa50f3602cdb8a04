"""Shares places in service fairly among tenants: the tenant with the fewest requests in service in proportion to its weight is
served next.

Places in service are shared, not arrivals: a tenant that floods a queue waits behind its own requests, a tenant with long requests
gets no more places than others, and nothing of the past needs to be remembered.
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
        """Returns the tenant to serve next: the one with the fewest requests in service in proportion to its weight. waiting: for
        each waiting tenant (tenant, weight, order of its first request); at least one. Among equal tenants the lowest order is
        served. O(tenants)."""
        active = self.active
        return min(waiting, key=lambda each: ((active.get(each[0], 0) + 1) / each[1], each[2]))[0]

    def crowding(self) -> str | None:
        """Returns the tenant with the most requests in service in proportion to its weight, among tenants that have more than one
        in service; None if there is none, or if only one tenant is in service."""
        several = [tenant for tenant, number in self.active.items() if number > 1] if len(self.active) > 1 else []
        return max(several, key=lambda tenant: self.active[tenant] / self._weights[tenant], default=None)
