"""Fair shares of tenants: next is served who has least in service for its weight.

What is shared are places (sequences in service), not arrivals: a tenant that floods a queue waits behind itself, one whose requests
are long holds no more places for it, and nothing needs to be remembered of what is over.
"""

from __future__ import annotations

from collections.abc import Iterable


class Shares:
    def __init__(self) -> None:
        self.active: dict[str, int] = {}  # tenant -> requests in service
        self._weights: dict[str, float] = {}  # of those with any

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
        """Of tenants that wait, as (tenant, weight, order of its first request): who is served next. Among equals the order
        decides. O(tenants)."""
        active = self.active
        return min(waiting, key=lambda each: ((active.get(each[0], 0) + 1) / each[1], each[2]))[0]

    def crowding(self) -> str | None:
        """The tenant with most in service for its weight, among those with more than one; None where one tenant is alone."""
        several = [tenant for tenant, number in self.active.items() if number > 1] if len(self.active) > 1 else []
        return max(several, key=lambda tenant: self.active[tenant] / self._weights[tenant], default=None)
