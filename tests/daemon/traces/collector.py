"""A collector of OTLP over HTTP for tests. Its answers can be scripted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType

from aiohttp import web

from tests.daemon.traces.otlp_schema import SpanRead, read

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
DEADLINE_S = 60.0


class Collector:
    """A collector on this event loop, between `start` and `stop`. answers: taken one after the other; then it takes everything.
    headers: of the last request. taken: the spans that it said it has taken."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.headers: Mapping[str, str] = {}
        self.num_requests = 0
        self.taken: list[SpanRead] = []
        self.url = ""

    async def start(self, socket_path: str = "") -> Collector:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.UnixSite(self._runner, socket_path) if socket_path else web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"unix:{socket_path}" if socket_path else f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.StreamResponse:
        self.num_requests += 1
        self.headers = dict(request.headers)
        assert request.content_type == "application/json"
        spans = read(await request.read())
        if self.answers:
            answer = await self.answers.pop(0)(request)
            if answer.status != 200:
                return answer
            self.taken += spans
            return answer
        self.taken += spans
        return web.json_response({"partialSuccess": {}})

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def answering(status: int, body: bytes = b"", **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={name.replace("_", "-"): value for name, value in headers.items()})

    return answer


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("woken up")


class CollectorThread:
    """A collector in a thread of its own, for a node that is another process."""

    def __enter__(self) -> CollectorThread:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.collector = asyncio.run_coroutine_threadsafe(Collector().start(), self._loop).result(DEADLINE_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self.collector.stop(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return self.collector.url

    @property
    def spans(self) -> list[SpanRead]:
        return list(self.collector.taken)

    def wait_for(self, condition: Callable[[list[SpanRead]], bool], what: str) -> list[SpanRead]:
        """Waits until what has arrived is enough, and returns it."""
        end = time.monotonic() + DEADLINE_S
        while not condition(self.spans):
            assert time.monotonic() < end, f"no {what}: {[span.name for span in self.spans]}"
            time.sleep(0.02)
        return self.spans
