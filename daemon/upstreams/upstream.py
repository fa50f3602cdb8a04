"""One model name that another server answers: its address and key, whether the server is up, and its running and waiting
requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import Any

from daemon.errors import HearthError, NotNow
from daemon.upstreams import failure

UNKNOWN, UP, DOWN = "unknown", "up", "down"


@dataclass(slots=True, frozen=True)
class Address:
    """The destination of requests for one model name. url: the other server's URL, without a "/" at its end. host: its HOST:PORT,
    for messages. model: the model's name on that server. key: the API key for it; "" for none."""

    url: str
    host: str
    model: str
    key: str


@dataclass(slots=True, frozen=True)
class Bounds:
    """Limits for the requests to one upstream. max_active: how many run at once. max_queued: how many may wait to run.
    max_of_tenant: how many of one tenant may wait. max_wait_s: how many seconds each may wait."""

    max_active: int
    max_queued: int
    max_of_tenant: int
    max_wait_s: float


def bounds(max_active: int, max_queued: int, max_of_tenant: int, max_wait_s: float) -> Bounds:
    """Returns the limits with these values. max_of_tenant: 0 stands for half of max_queued; it is never more than max_queued."""
    return Bounds(max_active, max_queued, min(max_queued, max_of_tenant or ceil(max_queued / 2)), max_wait_s)


class Upstream:
    """One model name that another server answers: whether that server is up, and the name's running and waiting requests. All calls
    must come from the event loop."""

    def __init__(self, name: str, address: Address, limits: Bounds) -> None:
        self.name, self.address, self.limits = name, address, limits
        self.state, self.reason = UNKNOWN, "it was not asked yet"
        self.since_s = time.time()
        self.last_used_s: float | None = None  # Unix seconds
        self.max_model_len = 0  # the model's longest context; 0: the server does not tell
        self.note = ""  # a warning about a server that answers
        self._active: Counter[str] = Counter()  # running requests by tenant
        self._waiting: dict[asyncio.Future[None], str] = {}  # waiting requests -> tenant, in the order of arrival

    @property
    def num_active(self) -> int:
        return self._active.total()

    @property
    def num_queued(self) -> int:
        return len(self._waiting)

    # ---- health

    def set_state(self, state: str, reason: str) -> bool:
        """Sets whether the server is up, and returns whether that has changed. state: UNKNOWN, UP or DOWN. reason: words for
        operators."""
        changed, self.reason = state != self.state, reason
        if changed:
            self.state, self.since_s = state, time.time()
        return changed

    def refusal(self, tenant: str) -> HearthError | None:
        """Returns the error with which a request of the tenant would be refused now, because the server is down or the queue is
        full, as far as is known; None: it would be accepted."""
        if self.state == DOWN:
            return failure.unavailable(self.address.host, self.reason)
        return self._queue_full(tenant) if self.num_active >= self.limits.max_active else None

    # ---- places

    async def enter(self, tenant: str) -> None:
        """Waits until a request of the tenant may run; the caller must call `leave` when the request has ended. Raises HearthError:
        queue_full (429) if too many requests wait already, wait_exceeded (503) if this one has waited for max_wait_s."""
        self.last_used_s = time.time()
        if self.num_active < self.limits.max_active and not self._waiting:
            self._active[tenant] += 1
            return
        if (full := self._queue_full(tenant)) is not None:
            raise full
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = tenant
        limit_s = self.limits.max_wait_s
        try:
            async with asyncio.timeout(limit_s):
                await place
        except BaseException as error:
            self._waiting.pop(place, None)
            if place.done() and not place.cancelled():  # it was given a place in the same iteration of the event loop
                self.leave(tenant)
            if isinstance(error, TimeoutError):
                message = f"waited {limit_s:g} s for a place at {self.address.host} for {self.name} (max_wait_s)"
                raise NotNow("wait_exceeded", message, retry_after_s=failure.RETRY_AFTER_S) from None
            raise

    def leave(self, tenant: str) -> None:
        """Records that a running request of the tenant has ended. Then the first waiting request of the tenant with the fewest
        running requests may run."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
        self._fill()

    def set_bounds(self, limits: Bounds) -> None:
        self.limits = limits
        self._fill()

    def _fill(self) -> None:
        while self._waiting and self.num_active < self.limits.max_active:
            place = min(self._waiting, key=lambda each: self._active[self._waiting[each]])
            tenant = self._waiting.pop(place)
            if not place.done():
                self._active[tenant] += 1
                place.set_result(None)

    def _queue_full(self, tenant: str) -> HearthError | None:
        limits = self.limits
        of_tenant = sum(each == tenant for each in self._waiting.values())
        if len(self._waiting) >= limits.max_queued:
            message = f"{len(self._waiting)} requests wait for {self.name}; max_queued is {limits.max_queued}"
        elif tenant and of_tenant >= limits.max_of_tenant:
            message = f"{of_tenant} requests of {tenant} wait for {self.name}; {limits.max_of_tenant} may"
        else:
            return None
        return NotNow("queue_full", message, status=429, retry_after_s=1.0)

    # ---- for operators

    def row(self) -> dict[str, Any]:
        """Returns the row of `hearth models` for this name. It has the fields that the row of each model on this node has, except
        those about devices and formats, and `upstream`: the server's HOST:PORT."""
        return {
            "name": self.name,
            "kind": "upstream",
            "state": self.state,
            "device": "",
            "upstream": self.address.host,
            "weights_bytes": 0,
            "kv_bytes": 0,
            "active": self.num_active,
            "queued": self.num_queued,
            "pinned": False,
            "last_used": None if self.last_used_s is None else round(self.last_used_s, 3),
            "reason": self.reason,
            "host_bytes": 0,
            "saved_kv_tokens": 0,
            "keep_alive_s": None,
            "leaves": None,
        }

    def lines(self) -> list[str]:
        """Returns the lines with which `hearth why` explains the name: who answers it, the server's state, and how many requests
        run and wait."""
        ago_s = max(0.0, time.time() - self.since_s)
        there = "" if self.address.model == self.name else f" as {self.address.model!r}"
        lines = [f"{self.name} is answered by {self.address.url}{there} (upstream); nothing of it is on this node"]
        lines.append(f"now {self.state} for {ago_s:.0f} s: {self.reason}")
        if self.note:
            lines.append(self.note)
        lines.append(f"{self.num_active} requests are there, {self.num_queued} wait; at most {self.limits.max_active} at once")
        return lines
