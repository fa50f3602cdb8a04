"""Sends spans to a collector, in batches, by OTLP over HTTP. A slow collector delays nothing else: the queue is bounded, each post
has a deadline, and spans that cannot be sent are dropped and counted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp

from config.trace_endpoint import TraceEndpoint
from daemon.process import retry_after
from daemon.process.resolver import DaemonThreadResolver
from daemon.process.version import VERSION
from daemon.traces import otlp
from daemon.traces.span_counts import SpanCounts

log = logging.getLogger("hearthd")
MAX_QUEUED = 8192  # spans, some 5 MB
BATCH = 512  # the most spans in a post, unless a single trace has more
SEND_EVERY_S = 2.0  # how long a smaller batch waits for more spans
POST_S = 10.0  # how long the collector may take to answer
RETRY_FOR_S = 60.0  # after that a batch is given up
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
CLOSE_S = 1.0  # how long the stop waits for the collector
TELL_EVERY_S = 60.0
ANSWER_BYTES = 64 << 10
_AGAIN = (429, 502, 503, 504)  # statuses after which an OTLP client should try again


class _Batch(NamedTuple):
    spans: bytes
    num: int


class _Answer(NamedTuple):
    """The result of posting one batch to the collector. problem: why the batch was not accepted, "" if it was. again: whether to
    send the batch again. retry_after_s: the seconds to wait before that, as the collector asks; None: it names none. num_rejected:
    the number of spans that the collector did not accept."""

    problem: str = ""
    again: bool = False
    retry_after_s: float | None = None
    num_rejected: int = 0


class Exporter:
    """Queues spans and sends them to the collector while `run` runs. problem: why spans cannot be sent now, "" if they can."""

    def __init__(
        self,
        endpoint: TraceEndpoint,
        headers: Mapping[str, str],
        resource: bytes,
        counts: SpanCounts,
        retry_for_s: float = RETRY_FOR_S,
    ) -> None:
        """endpoint, headers: the collector's address, and the HTTP headers for it. resource: the attributes of this node, as
        encoded by otlp.resource_json. counts: counts the spans that were sent and dropped. retry_for_s: for how many seconds a
        batch is tried again."""
        self._endpoint, self._resource, self._counts, self._retry_for_s = endpoint, resource, counts, retry_for_s
        self._headers = {
            **headers,
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": f"hearthd/{VERSION}",
        }
        self._scope = otlp.scope_json("hearthd", VERSION)
        self._queue: deque[_Batch] = deque()
        self._num_queued = self._num_on_the_way = 0
        self._any, self._full, self._closing = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._session: aiohttp.ClientSession | None = None
        self._told_s = -TELL_EVERY_S
        self.problem = ""

    def add(self, spans: bytes, num: int) -> None:
        """Queues the encoded spans of one trace, or drops all of them if there is no room. num: the number of spans."""
        if self._is_closed or self._num_queued + num > MAX_QUEUED:
            self._drop(num, self.problem or "the collector is too slow")
            return
        self._queue.append(_Batch(spans, num))
        self._num_queued += num
        self._idle.clear()
        self._any.set()
        if self._num_queued >= BATCH:
            self._full.set()

    async def run(self) -> None:
        """Sends queued spans to the collector in batches until `close` is called."""
        while not self._is_closed:
            await _first_of(self._any, self._closing)
            if self._queue and not self._closing.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(_first_of(self._full, self._closing), SEND_EVERY_S)
            if self._queue:
                await self._deliver(self._next())
            if not self._queue:
                self._any.clear()
                self._idle.set()
                if self._closing.is_set():
                    return

    async def close(self) -> None:
        """Sends the queued spans if the collector accepts them within CLOSE_S, and drops all others."""
        if self._is_closed:
            return
        self._closing.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), CLOSE_S)
        self._is_closed = True
        if left := self._num_queued + self._num_on_the_way:
            self._counts.num_dropped += left
            log.warning("traces: %d spans were not sent before the end%s", left, f": {self.problem}" if self.problem else "")
        if self._session is not None:
            await self._session.close()

    def _next(self) -> _Batch:
        taken: list[_Batch] = []
        num = 0
        while self._queue and (not taken or num + self._queue[0].num <= BATCH):
            taken.append(self._queue.popleft())
            num += taken[-1].num
        self._num_queued -= num
        self._num_on_the_way = num
        if self._num_queued < BATCH:
            self._full.clear()
        return _Batch(otlp.request(self._resource, self._scope, [each.spans for each in taken]), num)

    async def _deliver(self, batch: _Batch) -> None:
        """Sends a batch of spans to the collector. After a failure, sends it again if that may help, for at most retry_for_s
        seconds. Counts the spans that were sent and those that were dropped."""
        give_up_s, pause_s = time.monotonic() + self._retry_for_s, FIRST_PAUSE_S
        while True:
            answer = await self._post(batch.spans)
            if self._is_closed:
                return  # counted by `close`
            wait_s = pause_s * random.uniform(0.8, 1.2) if answer.retry_after_s is None else answer.retry_after_s
            if not answer.again or self._closing.is_set() or time.monotonic() + wait_s > give_up_s:
                break
            self._found(answer.problem)
            await self._pause(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._num_on_the_way = 0
        num_dropped = batch.num if answer.problem and not answer.num_rejected else min(answer.num_rejected, batch.num)
        self._counts.num_sent += batch.num - num_dropped
        self._found(answer.problem)
        if num_dropped:
            self._drop(num_dropped, answer.problem)

    async def _pause(self, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), wait_s)

    async def _post(self, body: bytes) -> _Answer:
        if self._session is None:
            resolver = DaemonThreadResolver()
            unix = self._endpoint.socket
            connector = aiohttp.UnixConnector(unix) if unix else aiohttp.TCPConnector(limit=1, resolver=resolver)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=POST_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        status = 0
        try:
            async with self._session.post(self._endpoint.url, data=body, headers=self._headers, allow_redirects=False) as response:
                status = response.status
                if status // 100 == 2:
                    return _taken(await _read(response))
                retry_after_s = retry_after.seconds(response.headers.get("Retry-After")) if status in _AGAIN else None
                return _Answer(f"it answers {status}", status in _AGAIN, retry_after_s)
        except TimeoutError:
            problem = f"it does not answer within {POST_S:g} s"
        except Exception as error:  # anything that the network or a broken answer may raise
            problem = f"{type(error).__name__}: {error}"[:200]
        return _Answer() if status // 100 == 2 else _Answer(problem, again=True)  # a 2xx status means accepted

    def _found(self, problem: str) -> None:
        if problem and not self.problem:
            self._tell(f"traces cannot be sent to {self._where}: {problem}")
        elif self.problem and not problem:
            log.info("traces are sent to %s again; %d spans were dropped so far", self._where, self._counts.num_dropped)
        self.problem = problem

    def _drop(self, num: int, why: str) -> None:
        self._counts.num_dropped += num
        self._tell(f"traces: {self._counts.num_dropped} spans dropped so far, {self._where}: {why}")

    def _tell(self, line: str) -> None:
        now = time.monotonic()
        if now - self._told_s >= TELL_EVERY_S:
            self._told_s = now
            log.warning("%s", line)

    @property
    def _where(self) -> str:
        return f"unix:{self._endpoint.socket}" if self._endpoint.socket else self._endpoint.url

    def problems(self) -> list[str]:
        """Returns the problems for `hearth status`: a sentence while spans cannot be sent, [] otherwise."""
        if not self.problem:
            return []
        return [f"traces cannot be sent to {self._where}: {self.problem}; {self._counts.num_dropped} spans were dropped"]


async def _first_of(*events: asyncio.Event) -> None:
    """Waits until at least one of the events is set."""
    if any(event.is_set() for event in events):
        return
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


def _taken(answer: bytes) -> _Answer:
    num_rejected, why = otlp.num_rejected(answer)
    return _Answer(f"it rejects spans: {why[:200]}" if num_rejected else "", num_rejected=num_rejected)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Returns the body of the collector's response, of which at most ANSWER_BYTES are read."""
    answer = b""
    async for part in response.content.iter_any():
        answer += part
        if len(answer) > ANSWER_BYTES:
            break
    return answer[:ANSWER_BYTES]
