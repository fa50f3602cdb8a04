"""Limits how many jobs of a kind are done at once: each job takes one of a number of places, and tenants that wait for a place get
one in fair turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from scheduler.fair_queue import FairQueue


@dataclass(slots=True, frozen=True)
class Share:
    """A tenant's share of the work on texts. tenant: the tenant's name, "" if no keys are set. weight: the tenant's weight in the
    keys file."""

    tenant: str = ""
    weight: float = 1.0


NOBODY = Share()  # for work that is no tenant's own, such as reading a vocabulary


@dataclass(slots=True, eq=False)
class _Waiting:
    share: Share
    num_bytes: int
    since_s: float
    place: asyncio.Future[int]


class Places:
    """A number of places for jobs, numbered from 0. A free place goes to the waiting tenant for which the least work was done,
    relative to its weight. num: how many places there are. of_each: how many places one tenant may hold at a time. All calls must
    come from the event loop."""

    def __init__(self, num: int, of_each: int) -> None:
        self._free = set(range(num))
        self._of_each = of_each
        self._held: Counter[str] = Counter()  # places by tenant
        self._queue = FairQueue()
        self._waiting: dict[int, _Waiting] = {}
        self._last_id = 0

    def take(self, share: Share) -> int | None:
        """Returns the number of a free place, which the caller must `leave`. Returns None if no place is free or the tenant holds
        as many as it may; the caller then waits with `turn`."""
        if not self._free or self._held[share.tenant] >= self._of_each:
            return None
        self._last_id += 1
        self._queue.add(self._last_id, 1.0, share.tenant, share.weight)
        self._queue.take(self._last_id)  # counts the job as work done for its tenant
        return self._given(share)

    async def turn(self, share: Share, num_bytes: int) -> int:
        """Waits for a place and returns its number; the caller must `leave` it. num_bytes: the length of the job's text, which is
        shown to operators."""
        loop = asyncio.get_running_loop()
        self._last_id = own_id = self._last_id + 1
        place: asyncio.Future[int] = loop.create_future()
        self._waiting[own_id] = _Waiting(share, num_bytes, loop.time(), place)
        self._queue.add(own_id, 1.0, share.tenant, share.weight)
        try:
            return await place
        except asyncio.CancelledError:
            if self._waiting.pop(own_id, None) is not None:
                self._queue.withdraw(own_id)
            elif not place.cancelled():  # it was given a place in the same iteration of the event loop
                self.leave(place.result(), share)
            raise

    def leave(self, place: int, share: Share) -> None:
        """Gives a place back. share: the share with which it was taken."""
        self._free.add(place)
        self._held[share.tenant] -= 1
        if not self._held[share.tenant]:
            del self._held[share.tenant]
        while self._free:
            full = {tenant for tenant, num in self._held.items() if num >= self._of_each}
            next_id = self._queue.first(without=full)
            if next_id is None:
                return
            waiting = self._waiting.pop(next_id)
            if waiting.place.done():  # its client is gone
                self._queue.withdraw(next_id)
                continue
            self._queue.take(next_id)
            waiting.place.set_result(self._given(waiting.share))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def waiting(self) -> list[tuple[str, int, float]]:
        """Returns a tuple for each job that waits: its tenant, its bytes, and the time since which it has waited (the event loop's
        time)."""
        return [(each.share.tenant, each.num_bytes, each.since_s) for each in self._waiting.values()]

    def _given(self, share: Share) -> int:
        place = min(self._free)
        self._free.remove(place)
        self._held[share.tenant] += 1
        return place
