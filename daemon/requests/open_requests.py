"""Keeps every accepted request until it ends: finds requests by id, ends those that time out, and counts them when they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from daemon.contracts import Generation
from daemon.metrics.counters import Metrics
from daemon.process.loop_watch import LoopWatch

PUBLIC_IDS = 4096


class OpenRequests:
    """Holds every request from its acceptance to its end. by_id: request id -> request, in the order of arrival. timeout_s: returns
    how many seconds a request may take. on_timeout: called with a request that has taken longer and with the limit in seconds; must
    end the request."""

    def __init__(
        self, metrics: Metrics, watch: LoopWatch, timeout_s: Callable[[], float], on_timeout: Callable[[Generation, float], None]
    ) -> None:
        self.by_id: dict[int, Generation] = {}
        self._metrics, self._watch, self._timeout_s, self._on_timeout = metrics, watch, timeout_s, on_timeout
        self._loop = asyncio.get_running_loop()
        self._public_ids: dict[str, int] = {}  # X-Request-Id -> request id, of the last PUBLIC_IDS requests, oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Future[None] | None = None
        self.on_end: Callable[[Generation], None] = lambda generation: None  # called with each request that has ended

    def add(self, generation: Generation) -> None:
        self.by_id[generation.request_id] = generation
        if generation.public_id:
            self._public_ids[generation.public_id] = generation.request_id
            if len(self._public_ids) > PUBLIC_IDS:
                del self._public_ids[next(iter(self._public_ids))]

    def accepted(self, generation: Generation) -> None:
        """Counts the prompt of a request that was not refused. If the request has not ended already, starts the timer for timeouts
        and the watch of the event loop, unless they run."""
        self._metrics.prompt_tokens[generation.model.name] += len(generation.prompt)
        if generation.request_id in self.by_id:
            self._watch.start()
            if self._timer is None:
                self._timer = self._loop.call_later(self._timeout_s(), self._check_timeouts)

    def end(self, generation: Generation, outcome: str) -> None:
        """Removes a request that has ended, counts it and ends its trace. outcome: stop, length, cancelled, refused, failed or
        timeout."""
        self.by_id.pop(generation.request_id, None)
        generation.outcome = outcome
        if generation.trace is not None:
            generation.trace.ended(generation, time.monotonic())
        self._metrics.ended(generation)
        self.on_end(generation)
        if not self.by_id:
            self._watch.stop()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._empty is not None and not self._empty.done():
                self._empty.set_result(None)

    def request_id(self, public_id: str) -> int | None:
        """Returns the internal id of the request that has the X-Request-Id `public_id`, also if the request has ended, for `hearth
        why`. None if it is unknown or not among the last PUBLIC_IDS requests."""
        return self._public_ids.get(public_id)

    def when_empty(self) -> asyncio.Future[None]:
        """Returns a future that is done once no request is open."""
        if self._empty is None or self._empty.done():
            self._empty = self._loop.create_future()
        if not self.by_id:
            self._empty.set_result(None)
        return self._empty

    def _check_timeouts(self) -> None:
        """Ends requests that have exceeded the timeout, and sets the timer for the next one. Time in which a request was paused
        does not count."""
        self._timer = None
        limit_s = self._timeout_s()
        now = time.monotonic()
        next_s = limit_s
        for generation in list(self.by_id.values()):
            if self.by_id.get(generation.request_id) is not generation:
                continue  # the timeout of another sequence of the same client request has ended it
            left_s = generation.arrived_s + limit_s - now
            if left_s > 0:
                next_s = min(next_s, left_s)
                break
            left_s = limit_s - generation.lived_s(now)
            if left_s > 0:
                next_s = min(next_s, left_s)
            else:
                self._on_timeout(generation, limit_s)
        if self.by_id and self._timer is None:
            self._timer = self._loop.call_later(next_s, self._check_timeouts)
