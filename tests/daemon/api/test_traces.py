"""What traces say of HTTP requests: where they come from, what is asked and answered, errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from daemon.errors import NotNow, ServerFault
from daemon.models.entry import ServedAdapter
from daemon.traces.tracer import Tracer
from engine.protocol import FINISH_NONE
from tests.daemon.api import fakes
from tests.daemon.api.fakes import text_script
from tests.daemon.traces.otlp_schema import SpanRead
from tests.daemon.traces.test_trace_context import GOOD, SPAN, TRACE
from tests.daemon.traces.test_tracer import Out

ADAPTER = ServedAdapter("me/sql", "/models/me/sql", "a" * 32, ("sql",), 1700000001, 8, 4096)
MODELS = [fakes.entry(), fakes.entry("org/encoder", aliases=(), embedding_size=4), fakes.entry(adapter=ADAPTER)]
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


@dataclass
class TracedNode:
    node: fakes.Node
    http: aiohttp.ClientSession
    out: Out

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, bytes, str]:
        """Returns status, body and traceresponse."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(path, json=body, headers=named) as response:
            return response.status, await response.read(), response.headers.get("traceresponse", "")

    async def span(self) -> SpanRead:
        """Returns the only request's, once the handler has ended; a client may have the end of a stream before."""
        async with asyncio.timeout(60):
            while not self.out.num:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (span,) = self.out.spans
        assert span.kind == 2
        return span


@contextlib.asynccontextmanager
async def traced(sample: float = 1.0, script: Any = None) -> AsyncIterator[TracedNode]:
    out = Out()
    tracer = Tracer(sample, out)
    async with (
        fakes.serve(script, models=MODELS, tracer=lambda: tracer) as node,
        aiohttp.ClientSession(node.url) as http,
    ):
        yield TracedNode(node, http, out)


async def test_a_chat() -> None:
    async with traced() as made:
        status, _, told = await made.post("/v1/chat/completions", CHAT | {"temperature": 0.5, "n": 2}, X_Request_Id="mine")
        assert status == 200
        span = await made.span()
    assert told == f"00-{span.trace_id}-{span.span_id}-01"
    assert (span.name, span.parent_id, span.status, span.state) == ("chat org/tiny", "", {}, "")
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "hearthd",
        "gen_ai.request.model": "org/tiny",
        "gen_ai.response.model": "org/tiny",
        "gen_ai.response.id": "chatcmpl-mine",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": [],  # outcomes are the dispatcher's
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "hearth.sequences": 2,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": "/v1/chat/completions",
        "network.protocol.version": "1.1",
        "user_agent.original": span.attributes["user_agent.original"],
        "hearth.request_id": "mine",
    }
    assert "hello" not in str(span)


async def test_an_adapter_is_named_beside_its_base() -> None:
    async with traced() as made:
        assert (await made.post("/v1/chat/completions", CHAT | {"model": "sql"}))[0] == 200
        span = await made.span()
    assert span.name == "chat me/sql"
    told = {key: value for key, value in span.attributes.items() if "model" in key or "adapter" in key}
    assert told == {
        "gen_ai.request.model": "me/sql",
        "gen_ai.response.model": "me/sql",
        "hearth.model": "org/tiny",
        "hearth.adapter": "me/sql",
    }


async def test_an_adapter_is_named_in_work_that_is_no_model_s() -> None:
    async with traced() as made:
        assert (await made.post("/tokenize", {"model": "sql", "prompt": "hi"}))[0] == 200
        span = await made.span()
    assert {key: span.attributes[key] for key in ("hearth.model", "hearth.adapter")} == {
        "hearth.model": "org/tiny",
        "hearth.adapter": "me/sql",
    }


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_caller_s_trace_goes_on(is_stream: bool) -> None:
    async with traced(sample=0.0) as made:
        body = CHAT | {"stream": is_stream}
        _, _, told = await made.post("/m/tiny/v1/chat/completions", body, traceparent=GOOD, tracestate="a=b")
        span = await made.span()
    assert (span.trace_id, span.parent_id, span.state) == (TRACE, SPAN, "a=b")
    assert told == f"00-{TRACE}-{span.span_id}-01"
    assert (span.attributes["url.path"], span.attributes["http.route"]) == ("/m/tiny/v1/chat/completions", "/v1/chat/completions")


async def test_a_caller_that_does_not_want_it() -> None:
    async with traced() as made:
        _, _, told = await made.post("/v1/chat/completions", CHAT, traceparent=GOOD[:-1] + "0")
        assert told.startswith(f"00-{TRACE}-")
        assert told.endswith("-00")
        assert made.out.num == 0
        assert all(each.trace is None for each in made.node.requests.submitted)


async def test_a_traceparent_that_is_none_begins_a_trace() -> None:
    async with traced() as made:
        await made.post("/v1/chat/completions", CHAT, traceparent=GOOD + "x", tracestate="a=b")
        span = await made.span()
    assert (span.parent_id, span.state) == ("", "")
    assert span.trace_id != TRACE


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "x"}, "text_completion org/tiny"),
        ("/v1/responses", {"model": "tiny", "input": "x"}, "chat org/tiny"),
        ("/v1/messages", CHAT, "chat org/tiny"),
        ("/api/chat", CHAT, "chat org/tiny"),
        ("/api/generate", {"model": "tiny", "prompt": "x"}, "text_completion org/tiny"),
        ("/tokenize", {"model": "tiny", "prompt": "x"}, "POST /tokenize"),
    ],
)
async def test_names(path: str, body: dict[str, Any], name: str) -> None:
    async with traced() as made:
        status, _, _ = await made.post(path, body)
        assert status == 200
        assert (await made.span()).name == name


async def test_what_is_no_work_leaves_none() -> None:
    async with traced() as made:
        for path in ("/healthz", "/v1/models", "/metrics", "/nowhere"):
            async with made.http.get(path) as response:
                assert "traceresponse" not in response.headers
        assert made.out.num == 0


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"model": "nobody"}, 404, "model_not_found"),
        ({"max_tokens": "x"}, 400, "invalid_request"),
        ({"model": "org/encoder"}, 400, "wrong_task"),
    ],
)
async def test_the_client_s_fault_is_no_error_of_the_server(changes: dict[str, Any], status: int, code: str) -> None:
    async with traced() as made:
        told_status, _, told = await made.post("/v1/chat/completions", CHAT | changes)
        assert told_status == status
        span = await made.span()
    assert span.span_id in told
    assert (span.status, span.attributes["error.type"], span.attributes["http.response.status_code"]) == ({}, code, status)
    assert span.name == ("chat org/encoder" if code == "wrong_task" else "chat")


async def test_not_now() -> None:
    async with traced() as made:
        made.node.requests.refusal = NotNow("queue_full", "full", status=503)
        await made.post("/v1/chat/completions", CHAT)
        assert (await made.span()).status == {"code": 2, "message": "queue_full"}


async def test_a_stream_that_ends_with_an_error() -> None:
    """The dispatcher notes the code of the error, which here the script plays."""

    def script(generation: Any) -> Any:
        generation.trace.failed("nan_logits")
        return [([65], FINISH_NONE), ServerFault("nan_logits", "logits are not finite")]

    async with traced(script=script) as made:
        status, body, _ = await made.post("/v1/chat/completions", CHAT | {"stream": True})
        assert status == 200
        assert b"nan_logits" in body
        span = await made.span()
    assert (span.status, span.attributes["http.response.status_code"]) == ({"code": 2, "message": "nan_logits"}, 200)


async def test_a_client_that_leaves() -> None:
    async with traced(script=lambda _: [60.0]) as made, asyncio.timeout(60):
        asking = asyncio.ensure_future(made.post("/v1/chat/completions", CHAT))
        while not made.node.requests.submitted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asking.cancel()
        span = await made.span()
        assert made.node.requests.cancel_event.is_set()
    assert (span.status, span.attributes["http.response.status_code"]) == ({}, 499)


async def test_hostile_headers() -> None:
    async with traced(script=lambda _: text_script(b"hi")) as made:
        raw = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nUser-Agent: \xff\xfe\r\nContent-Type: application/json\r\n"
        raw += (
            b"traceparent: \xff\r\ntracestate: \xff\r\nConnection: close\r\nContent-Length: 30\r\n\r\n"
            + b'{"model":"tiny","prompt":"x" }'
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", made.node.port)
        writer.write(raw)
        assert b" 200 OK" in await reader.read()
        writer.close()
        assert (await made.span()).attributes["user_agent.original"] == "??"


async def test_off_by_default() -> None:
    async with fakes.serve() as node, aiohttp.ClientSession(node.url) as http:
        async with http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": GOOD}) as response:
            assert response.status == 200
            assert "traceresponse" not in response.headers
        assert node.requests.submitted[0].trace is None
