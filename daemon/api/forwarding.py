"""Forwards requests for models that another server answers (`upstream`): the body is sent there with the model's name replaced, and
the answer is passed back as it arrives.

Of the client's headers only X-Request-Id, traceparent, tracestate and Via are forwarded. The client's key never is. By Via a server
recognizes a request that it has forwarded itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import aiohttp
import msgspec
from aiohttp import web

from daemon.api.bodies import forwarded
from daemon.api.body_parts import read_data
from daemon.api.endpoint import Call
from daemon.contracts import Generation, ReportedUsage
from daemon.errors import BadRequest, HearthError
from daemon.http.answers import event_response
from daemon.models.entry import ModelEntry
from daemon.streams.stream_parts import SSE_COMMENT
from daemon.traces.trace_context import RESPONSE_HEADER
from daemon.upstreams import failure, keys, via
from daemon.upstreams.answer import Answer, AnswerStream
from daemon.upstreams.upstream import Upstream
from daemon.upstreams.upstreams import Upstreams
from engine.protocol import SamplingParams

MAX_ANSWER_BYTES = 256 << 20
MAX_ERROR_BYTES = 64 << 10
BYTES_A_TOKEN = 4  # bytes of text per token, if the server does not report its tokens
LONG_PROMPT_TOKENS = 32_768  # the upper limit of an estimated prompt
LAST_BYTES_S = 1.0  # how long a server may take to end an answer whose last event has come
_PASSED_ON = ("traceparent", "tracestate")


async def answer_elsewhere(call: Call, upstreams: Upstreams, path: str) -> web.StreamResponse | None:
    """Forwards a request if another server answers for its model, and returns the answer; otherwise returns None, and the endpoint
    answers. path: the endpoint's path below that server's address. Raises HearthError."""
    models, body = call.context.models, call.endpoint.body
    assert body is not None
    if call.scope is not None and not models.resolve(call.scope).upstream:
        return None
    fields = forwarded.fields_of(await read_data(call, body))
    name = call.scope or (fields and forwarded.text_of(fields, "model"))
    if fields is None or not name:
        return None  # the endpoint reports what is wrong with the body
    try:
        model = call.resolved = models.resolve(name)
    except HearthError:
        return None
    if not model.upstream:
        return None
    upstream = upstreams.by_name.get(model.name)
    if upstream is None:
        raise BadRequest("model_removed", f"{model.name} is no longer answered by another server", param="model", status=404)
    return await _Forwarded(call, upstreams, upstream, model, fields, path).answer()


class _Sink:
    """The TokenSink of a request that another server answers. No engine sends it tokens. Its failed(), called when the request
    times out or the node stops, ends the exchange with the other server."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.error: HearthError | None = None
        self._limit = limit

    def tokens(self, ids: object, finish: int) -> None:
        raise AssertionError("no engine has this request")

    def failed(self, error: HearthError) -> None:
        self.error = error
        with contextlib.suppress(RuntimeError):  # the exchange has ended already
            self._limit.reschedule(asyncio.get_running_loop().time())


class _Forwarded:
    """One request that another server answers: sends it there, passes the answer back, and charges its tokens to the tenant."""

    def __init__(
        self, call: Call, upstreams: Upstreams, upstream: Upstream, model: ModelEntry, fields: dict[str, msgspec.Raw], path: str
    ) -> None:
        self._call, self._upstreams, self._upstream, self._path = call, upstreams, upstream, path
        self._is_stream = forwarded.is_true(fields, "stream")
        self._shows_usage = forwarded.asks_for_usage(fields)
        self._body = forwarded.renamed(fields, upstream.address.model, with_usage=self._is_stream)
        self._via = via.onward(call.request.headers.getall("Via", ()))
        self._limit = asyncio.timeout(None)
        self._sink = _Sink(self._limit)
        self._reported = ReportedUsage()
        asked = forwarded.whole_number(fields, "priority")
        self._generation = Generation(
            model,
            [],
            SamplingParams(max_tokens=0),
            self._sink,
            public_id=call.request_id,
            priority=call.context.sender.priority(asked),
            reported=self._reported,
        )
        self._response: web.StreamResponse | None = None  # the response, once its head was sent

    async def answer(self) -> web.StreamResponse:
        """Sends the request and returns the answer: a whole one, or a stream after its last byte was sent. Raises HearthError
        before the first byte."""
        requests = self._call.context.requests
        self._call.context.sender.charge(0, "model")
        requests.forward(self._generation)
        outcome = "failed"
        try:
            response, outcome = await self._answer_in_time()
            return response
        except HearthError as error:
            outcome = "refused" if error.status < 500 or error.code == "wait_exceeded" else "failed"
            raise
        except asyncio.CancelledError:  # the client is gone
            outcome = "cancelled"
            raise
        finally:
            requests.forwarded(self._generation, outcome)

    async def _answer_in_time(self) -> tuple[web.StreamResponse, str]:
        """Waits until the other server has room for the request, then for its answer, both within the request's time limit. Returns
        the answer and the request's outcome ("stop", "length", "failed" or "cancelled"). An error after the first byte becomes the
        stream's last event; an earlier one is raised."""
        try:
            async with self._limit:
                tenant = self._call.tenant
                await self._upstream.enter(tenant)
                try:
                    return await self._exchange()
                finally:
                    self._upstream.leave(tenant)
        except (HearthError, TimeoutError) as error:
            told = error if isinstance(error, HearthError) else self._sink.error
            if told is None:
                raise
            if self._response is None:
                raise told from None
            await self._end_with(self._response, told)
            return self._response, "failed"

    async def _exchange(self) -> tuple[web.StreamResponse, str]:
        address, generation = self._upstream.address, self._generation
        headers = {"Content-Type": "application/json", "X-Request-Id": self._call.request_id, "Via": self._via}
        headers |= keys.headers(address.key)
        headers |= {name: value for name in _PASSED_ON if (value := self._call.request.headers.get(name)) is not None}
        if (own := self._call.context.more_headers.get(RESPONSE_HEADER)) is not None:
            headers["traceparent"] = own  # the other server's span becomes a child of this node's span
        generation.submitted_s = time.monotonic()
        self._reported.prompt_tokens = self._estimate()
        try:
            async with self._upstreams.session.post(
                f"{address.url}/{self._path}", data=self._body, headers=headers, allow_redirects=False
            ) as answer:
                self._upstreams.answered(self._upstream)
                if answer.status >= 300:
                    self._reported.prompt_tokens = 0
                    body = await answer.content.read(MAX_ERROR_BYTES)
                    raise failure.passed_on(address.host, answer.status, answer.headers.get("Retry-After"), body)
                return await (self._stream(answer) if self._is_stream else self._whole(answer))
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            if self._response is None:
                self._reported.prompt_tokens = 0
                self._upstreams.failed(self._upstream, failure.reason_of(error))
            raise failure.not_reached(address.host, error) from None

    async def _whole(self, answer: aiohttp.ClientResponse) -> tuple[web.StreamResponse, str]:
        host = self._upstream.address.host
        self._check_type(answer, "application/json")
        body = bytearray()
        while part := await answer.content.readany():
            if not body:
                self._generation.first_token_s = time.monotonic()
            body += part
            if len(body) > MAX_ANSWER_BYTES:
                raise failure.invalid(host, f"answered with more than {MAX_ANSWER_BYTES >> 20} MiB")
        made = Answer(host, self._generation.model.name, self._generation, self._shows_usage)
        told = made.whole(bytes(body))
        if made.has_text and not self._reported.output_tokens:
            self._reported.output_tokens = len(body) // BYTES_A_TOKEN
        return web.Response(body=told, content_type="application/json"), made.outcome

    async def _stream(self, answer: aiohttp.ClientResponse) -> tuple[web.StreamResponse, str]:
        self._check_type(answer, "text/event-stream")
        call, generation = self._call, self._generation
        made = AnswerStream(self._upstream.address.host, generation.model.name, generation, self._shows_usage)
        response = event_response(call.request_id, call.context.more_headers, "text/event-stream")
        try:
            with _client_may_go():
                await response.prepare(call.request)
            self._response = response
            while not made.is_over:
                part = await self._next(answer)
                out = SSE_COMMENT if part is None else made.feed(part) if part else made.ended()
                if made.has_begun and not generation.first_token_s:
                    generation.first_token_s = time.monotonic()
                if out:
                    with _client_may_go():
                        await response.write(out)
                if made.broken is not None:
                    raise made.broken
            with _client_may_go():
                await response.write_eof()
        except _ClientGone:
            return response, "cancelled"
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(LAST_BYTES_S):  # the connection can be reused only if nothing is left unread in it
                await answer.content.readany()
        return response, "failed" if made.has_failed else made.outcome

    async def _next(self, answer: aiohttp.ClientResponse) -> bytes | None:
        """Returns the next bytes of the answer, b"" at its end, or None if the server was silent for sse_comment_every_s seconds,
        so that the client should get a comment."""
        try:
            async with asyncio.timeout(self._call.context.settings.sse_comment_every_s):
                return await answer.content.readany()
        except TimeoutError:
            return None

    async def _end_with(self, response: web.StreamResponse, error: HearthError) -> None:
        """Sends the error as the stream's last event. If the client does not read it, its connection is closed."""
        try:
            async with asyncio.timeout(LAST_BYTES_S):
                await response.write(b"data: %b\n\n" % msgspec.json.encode(error.body()))
                await response.write_eof()
        except (ConnectionError, TimeoutError):
            if self._call.request.transport is not None:
                self._call.request.transport.abort()

    def _check_type(self, answer: aiohttp.ClientResponse, wanted: str) -> None:
        if answer.content_type != wanted:
            what = f"answered with the type {answer.content_type[:100]!r} where {wanted} was asked for"
            raise failure.invalid(self._upstream.address.host, what)

    def _estimate(self) -> int:
        """Returns an estimate of the prompt's tokens. It is charged if the answer breaks off before the server has reported the
        real number, so that no prompt is free."""
        return min(len(self._body) // BYTES_A_TOKEN, self._upstream.max_model_len or LONG_PROMPT_TOKENS)


class _ClientGone(Exception):
    """Raised when the client has closed its connection."""


@contextlib.contextmanager
def _client_may_go() -> Iterator[None]:
    """Returns a context manager for writes to the client, which converts a ConnectionError to _ClientGone. So any other
    ConnectionError means that the other server has closed its connection."""
    try:
        yield
    except ConnectionError:
        raise _ClientGone from None
