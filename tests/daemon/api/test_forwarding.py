"""Requests for a name that another server answers, with a server that does what it should not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from config.schema import ModelConfig, NodeConfig
from daemon.access.quotas import Quotas
from daemon.access.tenant import Limits
from daemon.contracts import Generation
from daemon.errors import NotNow
from daemon.traces.tracer import Tracer
from daemon.upstreams.upstream import DOWN, UP
from daemon.upstreams.upstreams import Upstreams
from tests.daemon.api import test_limits
from tests.daemon.api.fakes import Node, Settings, entry, serve
from tests.daemon.api.sse_events import events
from tests.daemon.traces.test_trace_context import GOOD, TRACE
from tests.daemon.traces.test_tracer import Out

CHAT: dict[str, Any] = {"model": "big", "messages": [{"role": "user", "content": "hi"}]}
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
WHOLE = {
    "id": "x",
    "model": "there",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "ho"}}],
    "usage": USAGE,
}
SSE = {"Content-Type": "text/event-stream"}
LIMIT_S = 30.0
Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


def chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"id": "x", "model": "there", "choices": [choice]}).encode()


LAST = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"id": "x", "model": "there", "choices": [], "usage": USAGE}).encode()


class Other:
    """The other server. behave: set by each test. asked: what came, (path, headers, body)."""

    def __init__(self) -> None:
        self.behave: Behaviour = self.answers
        self.asked: list[tuple[str, Any, Any]] = []
        self.left = asyncio.Event()  # a client has closed its connection

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, request.headers, json.loads(await request.read() or b"null")))
        try:
            return await self.behave(request)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise

    async def answers(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"data": [{"id": "there", "max_model_len": 4096}]})
        if not self.asked[-1][2].get("stream"):
            return web.json_response(WHOLE)
        return await self.streams(request, chunk("h"), chunk("o", "stop"), LAST)

    async def streams(self, request: web.Request, *parts: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response


@contextlib.asynccontextmanager
async def both(
    settings: Settings | None = None,
    url: str = "",
    quotas: Quotas | None = None,
    access: Any = None,
    tracer: Tracer | None = None,
    **model: Any,
) -> AsyncIterator[tuple[Other, Node, Upstreams]]:
    other = Other()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", other.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstreams = Upstreams()
    url = url or f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    named = ModelConfig(upstream=url, upstream_model="there", **model)
    upstreams.use(NodeConfig(models={"big": named}), {"big": "sk-secret"})
    models = [entry(), entry("big", aliases=("huge",), upstream=upstreams.by_name["big"].address.host)]
    try:
        more: dict[str, Any] = {"upstreams": upstreams, "quotas": quotas, "access": access, "tracer": lambda: tracer}
        async with serve(settings=settings, models=models, **more) as node:
            yield other, node, upstreams
    finally:
        await upstreams.close()
        await runner.cleanup()


@pytest.mark.parametrize("usage", [{"prompt_tokens": 7, "total_tokens": 7}, {"total_tokens": 7}])
async def test_scores_are_passed_on(usage: dict[str, int]) -> None:
    results = [{"index": 1, "relevance_score": 0.9}]
    async with both() as (other, node, _):

        async def behave(request: web.Request) -> web.StreamResponse:
            return web.json_response({"id": "x", "model": "there", "results": results, "usage": usage})

        other.behave = behave
        for path, below in (("/v1/rerank", "/v1/rerank"), ("/v2/rerank", "/v1/rerank"), ("/score", "/v1/score")):
            body = {"model": "huge", "query": "a", "documents": ["b", "c"]}
            async with aiohttp.ClientSession(node.url) as http, http.post(path, json=body) as answer:
                told = await answer.json()
            assert (answer.status, told["model"], told["results"]) == (200, "big", results)
            assert (other.asked[-1][0], other.asked[-1][2]) == (below, body | {"model": "there"})
            assert node.requests.submitted[-1].num_prompt_tokens == 7


async def post(node: Node, body: Any = CHAT, path: str = "/v1/chat/completions", **options: Any) -> tuple[int, Any, Any]:
    async with aiohttp.ClientSession(node.url) as http, http.post(path, json=body, **options) as answer:
        text = await answer.text()
        return answer.status, text if answer.content_type == "text/event-stream" else json.loads(text), answer.headers


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def ended(generation: Generation) -> str:
    await until(lambda: generation.outcome)
    return generation.outcome


async def test_what_goes_there_and_what_comes_back() -> None:
    async with both() as (other, node, _):
        body = {**CHAT, "model": "huge", "temperature": 0.50, "unknown": {"model": "huge"}}
        headers = {
            "X-Request-Id": "r-1",
            "traceparent": "00-aa-bb-01",
            "Authorization": "Bearer client",
            "Cookie": "c=1",
            "Via": "1.0 p",
        }
        status, got, came = await post(node, body, headers=headers | {"X-Forwarded-For": "10.1.1.1"})
        assert (status, got, came["X-Request-Id"]) == (200, {**WHOLE, "model": "big"}, "r-1")
        ((path, sent, there),) = other.asked
        assert (path, there) == ("/v1/chat/completions", {**body, "model": "there"})
        assert (sent["Authorization"], sent["X-Request-Id"], sent["traceparent"]) == ("Bearer sk-secret", "r-1", "00-aa-bb-01")
        assert sent["Via"].startswith("1.0 p, 1.1 hearthd-")
        assert not {"Cookie", "X-Forwarded-For"} & set(sent)
        (generation,) = node.requests.submitted
        assert (generation.num_prompt_tokens, generation.num_output_tokens, generation.outcome) == (7, 2, "stop")


async def test_the_other_servers_span_belongs_to_this_nodes() -> None:
    out = Out()
    async with both(tracer=Tracer(1.0, out)) as (other, node, _):
        _, _, came = await post(node, headers={"traceparent": GOOD})
        ((_, sent, _),) = other.asked
        assert sent["traceparent"] == came["traceresponse"] != GOOD
        await until(lambda: out.num == 1)
    (span,) = out.spans
    assert sent["traceparent"] == f"00-{TRACE}-{span.span_id}-01"
    assert (span.attributes["gen_ai.usage.input_tokens"], span.attributes["gen_ai.usage.output_tokens"]) == (7, 2)


@pytest.mark.parametrize(("asked", "shown"), [(None, False), ({"include_usage": True}, True), ({"include_usage": False}, False)])
async def test_a_stream(asked: dict[str, bool] | None, shown: bool) -> None:
    async with both() as (other, node, _):
        body = {**CHAT, "stream": True} | ({} if asked is None else {"stream_options": asked})
        status, text, came = await post(node, body, headers={"X-Request-Id": "r-2"})
        data, _, done = events(text)
        assert (status, done, came["X-Request-Id"], came.get("X-Accel-Buffering")) == (200, True, "r-2", "no")
        assert {each["model"] for each in data} == {"big"}
        assert "".join(each["choices"][0]["delta"]["content"] for each in data if each["choices"]) == "ho"
        assert any("usage" in each for each in data) is shown
        assert other.asked[0][2]["stream_options"] == {"include_usage": True}
        assert node.requests.submitted[0].num_output_tokens == 2


async def test_models_of_this_node_are_its_own_still() -> None:
    async with both() as (other, node, _):
        status, got, _ = await post(node, {**CHAT, "model": "tiny", "max_tokens": 2})
        assert (status, got["model"]) == (200, "org/tiny")
        for wrong in ({"messages": []}, {**CHAT, "model": "nobody"}, {**CHAT, "model": 5}, [1]):
            assert (await post(node, wrong))[0] in (400, 404)
        assert (await post(node, CHAT, "/m/tiny/v1/chat/completions"))[1]["model"] == "org/tiny"
        assert not other.asked
        assert (await post(node, CHAT, "/m/huge/v1/chat/completions"))[1]["model"] == "big"


async def test_the_list_names_the_server() -> None:
    async with both() as (_, node, upstreams), aiohttp.ClientSession(node.url) as http:
        watching = asyncio.create_task(upstreams.watch())
        await until(lambda: upstreams.by_name["big"].state == UP)
        watching.cancel()
        async with http.get("/v1/models/big") as answer:
            told = await answer.json()
        assert told["max_model_len"] == 4096
        assert told["upstream"]["state"] == "up"
        async with http.get("/api/tags") as answer:
            assert [each["name"] for each in (await answer.json())["models"]] == ["org/tiny"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "big", "input": "x"}),
        ("/v1/messages", {"model": "big", "messages": CHAT["messages"], "max_tokens": 5}),
        ("/api/chat", CHAT),
        ("/api/show", {"model": "big"}),
        ("/tokenize", {"model": "big", "prompt": "x"}),
    ],
)
async def test_other_paths_are_refused_by_name(path: str, body: dict[str, Any]) -> None:
    async with both() as (other, node, _):
        status, got, _ = await post(node, body, path)
        assert status == 400
        assert "use /v1/chat/completions" in json.dumps(got)
        assert not other.asked


async def refused(node: Node, body: Any = CHAT) -> tuple[int, str, str]:
    status, got, headers = await post(node, body)
    error = got["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "sk-secret" not in json.dumps(got)
    return status, error["code"], headers.get("Retry-After", "")


async def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    async with both(url=url) as (_, node, upstreams):
        assert await refused(node) == (503, "upstream_unavailable", "5")
        assert "Connection refused" in (await post(node))[1]["error"]["message"]
        assert upstreams.by_name["big"].state == DOWN
        assert node.requests.submitted[0].outcome == "failed"
        assert node.requests.submitted[0].num_prompt_tokens == 0, "nothing was sent"


async def test_a_server_that_closes_the_connection() -> None:
    async with both() as (other, node, upstreams):

        async def closes(request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(LIMIT_S)
            raise AssertionError

        other.behave = closes
        assert await refused(node) == (503, "upstream_unavailable", "5")
        assert upstreams.by_name["big"].num_active == 0
        other.behave = other.answers
        assert (await post(node))[0] == 200, "a name that is down is still tried"
        assert upstreams.by_name["big"].state == UP


async def test_errors_are_passed_on() -> None:
    async with both() as (other, node, _):

        async def is_busy(request: web.Request) -> web.StreamResponse:
            body = {"error": {"message": "slow down", "type": "tokens", "code": "rate_limit_exceeded", "param": None}}
            return web.json_response(body, status=429, headers={"Retry-After": "9"})

        other.behave = is_busy
        for body in (CHAT, {**CHAT, "stream": True}):
            assert await refused(node, body) == (429, "rate_limit_exceeded", "9")

        async def denies(request: web.Request) -> web.StreamResponse:
            return web.json_response({"error": {"message": "no such key sk-secret"}}, status=401)

        other.behave = denies
        assert await refused(node) == (502, "upstream_denied", "")
        assert {each.outcome for each in node.requests.submitted} == {"refused", "failed"}


@pytest.mark.parametrize("kind", ["text/html", "application/json"])
async def test_what_is_no_answer(kind: str) -> None:
    async with both() as (other, node, _):

        async def rubbish(request: web.Request) -> web.StreamResponse:
            return web.Response(text="<p>hello", content_type=kind)

        other.behave = rubbish
        for body in (CHAT, {**CHAT, "stream": True}):
            assert (await refused(node, body))[:2] == (502, "upstream_invalid")


@pytest.mark.parametrize("how", ["cut", "ended", "rubbish", "told"])
async def test_a_stream_that_breaks(how: str) -> None:
    async with both() as (other, node, _):

        async def breaks(request: web.Request) -> web.StreamResponse:
            end = {"rubbish": b"data: {broken\n\n", "told": b'data: {"error": {"message": "no memory"}}\n\n'}.get(how, b"data: {")
            response = await other.streams(request, chunk("h"), end)
            if how == "cut":
                await asyncio.sleep(0)
                assert request.transport is not None
                request.transport.close()
            return response

        other.behave = breaks
        status, text, _ = await post(node, {**CHAT, "stream": True})
        data, _, done = events(text)
        assert (status, done, data[0]["choices"][0]["delta"]["content"]) == (200, False, "h")
        assert data[-1]["error"]["message"]
        (generation,) = node.requests.submitted
        assert generation.outcome == "failed"
        assert (generation.num_output_tokens, generation.num_prompt_tokens > 0) == (1, True), "what was made is counted"


async def test_events_come_as_they_are_made_and_silence_is_filled() -> None:
    async with both(Settings(sse_comment_every_s=0.01)) as (other, node, _):
        go_on = asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            response = await other.streams(request, chunk("h"))
            await go_on.wait()
            await response.write(chunk("o", "stop") + LAST)
            return response

        other.behave = waits
        body = {**CHAT, "stream": True}
        async with aiohttp.ClientSession(node.url) as http, http.post("/v1/chat/completions", json=body) as answer:
            async with asyncio.timeout(LIMIT_S):
                assert b'"h"' in await answer.content.readuntil(b"\n\n"), "before the next one is made"
                assert (await answer.content.readuntil(b"\n\n")).startswith(b": ")
            go_on.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_ends_the_request_there(stream: bool) -> None:
    async with both() as (other, node, upstreams):

        async def hangs(request: web.Request) -> web.StreamResponse:
            response = await other.streams(request, chunk("h")) if stream else web.Response()
            await asyncio.sleep(LIMIT_S)
            return response

        other.behave = hangs
        async with aiohttp.ClientSession(node.url) as http:
            asking = asyncio.create_task(http.post("/v1/chat/completions", json={**CHAT, "stream": stream}).__aenter__())
            await until(lambda: other.asked and (not stream or node.requests.submitted[0].num_output_tokens))
            asking.cancel()
            if asking.done() and not asking.cancelled():
                asking.result().close()
        async with asyncio.timeout(LIMIT_S):
            await other.left.wait()
        assert await ended(node.requests.submitted[0]) == "cancelled"
        assert upstreams.by_name["big"].num_active == 0
        assert node.requests.submitted[0].num_prompt_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_time_is_over(stream: bool) -> None:
    async with both() as (other, node, _):

        async def hangs(request: web.Request) -> web.StreamResponse:
            if stream:
                await other.streams(request, chunk("h"))
            await asyncio.sleep(LIMIT_S)
            raise AssertionError

        other.behave = hangs
        asking = asyncio.create_task(post(node, {**CHAT, "stream": stream}))
        await until(lambda: other.asked and (not stream or node.requests.submitted[0].num_output_tokens))
        node.requests.submitted[0].sink.failed(NotNow("request_timeout", "too late"))
        status, got, _ = await asking
        if stream:
            data, _, done = events(got)
            assert (status, data[-1]["error"]["code"], done) == (200, "request_timeout", False)
        else:
            assert (status, got["error"]["code"]) == (503, "request_timeout")
        async with asyncio.timeout(LIMIT_S):
            await other.left.wait()


async def test_a_slow_reader_slows_the_server_down() -> None:
    """The other server must not be able to fill this node's memory: what it may send ahead is bounded."""
    async with both() as (other, node, _):
        sent, limit = 0, 64 << 20
        big = chunk("x" * 65536)

        async def floods(request: web.Request) -> web.StreamResponse:
            nonlocal sent
            response = await other.streams(request)
            while sent < limit:
                await response.write(big)
                sent += len(big)
            await response.write(chunk("", "stop") + LAST)
            return response

        other.behave = floods
        body = {**CHAT, "stream": True}
        async with (
            aiohttp.ClientSession(node.url, read_bufsize=1024) as http,
            http.post("/v1/chat/completions", json=body) as answer,
        ):
            before = -1
            async with asyncio.timeout(LIMIT_S):
                while sent != before or not sent:
                    before = sent
                    await asyncio.sleep(0.1)
            assert 0 < sent < limit // 2
            async with asyncio.timeout(LIMIT_S):
                async for _ in answer.content.iter_any():
                    pass
        assert await ended(node.requests.submitted[0]) == "stop"


async def test_places_are_bounded_and_full_queues_refuse() -> None:
    async with both(max_sequences=1, max_queued=1) as (other, node, upstreams):
        go_on = asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            await go_on.wait()
            return await other.answers(request)

        other.behave = waits
        asking = [asyncio.create_task(post(node)) for _ in range(2)]
        await until(lambda: other.asked and upstreams.by_name["big"].num_queued)
        assert await refused(node) == (429, "queue_full", "1")
        assert len(other.asked) == 1
        go_on.set()
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200, 200]


async def test_limits_of_a_tenant_count_what_the_server_reports() -> None:
    access, quotas = test_limits.access(Limits(tokens_per_minute=8)), Quotas()
    async with both(access=access, quotas=quotas) as (other, node, _), test_limits.client(node.url) as http:
        statuses = []
        for stream in (True, False):
            async with http.post("/v1/chat/completions", json={**CHAT, "stream": stream}) as answer:
                await answer.read()
                statuses.append(answer.status)
        assert statuses == [200, 429], "9 tokens of 8: the next waits"
        assert len(other.asked) == 1
        async with http.post("/v1/chat/completions", json={**CHAT, "priority": "x"}) as answer:
            assert answer.status == 429


async def test_a_node_that_leads_to_itself() -> None:
    async with both() as (_, node, upstreams):
        one = upstreams.by_name["big"]
        upstreams.use(NodeConfig(models={"big": ModelConfig(upstream=f"{node.url}/v1")}), {})
        assert upstreams.by_name["big"] is not one
        status, got, _ = await post(node)
        assert (status, got["error"]["code"]) == (508, "upstream_loop")
        watching = asyncio.create_task(upstreams.watch())
        await until(lambda: upstreams.by_name["big"].reason == "it is this very node")
        watching.cancel()
        assert upstreams.by_name["big"].state == DOWN
