"""The HTTP connection of a client: a subclass of aiohttp's that can be handed over to the next daemon, and that answers malformed
HTTP with an error in the listener's own form.

aiohttp itself would answer malformed HTTP in plain text, in HTTP/1.0 and with its own server name, and the daemon would not count
the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10, HttpVersion11
from aiohttp.http_exceptions import InvalidURLError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

from daemon.errors import BadRequest, HearthError, ServerFault
from daemon.http.answers import refusal
from daemon.http.request_id import request_id
from daemon.streams.so_far import ConnectionSoFar, RequestSoFar

log = logging.getLogger("hearthd.http")
HEADER_BYTES = 32 << 10  # the limit for one header with its name, and for a request's target
VERSIONS = (HttpVersion11, HttpVersion10)
HEAD_BYTES = 256 << 10  # the limit for a request's target and headers together
HEAD_LIMIT_S = 10.0  # how long a request's head may take, from connecting or from its first byte
LOOK_AGAIN_S = 0.1
LINGER_S = 5.0  # how long a refused client may take to send the rest and read the answer
_REWRITTEN = (b"content-length", b"transfer-encoding", b"expect", b"x-request-id")  # headers that a handed-over request gets anew


class InProgress(Protocol):
    """The state of a request that a connection is answering. body: the part of its body that was read so far; a bytearray while
    more is expected. is_handed_over: whether the next daemon continues the request."""

    request_id: str
    body: bytes | bytearray
    is_handed_over: bool

    def so_far(self) -> RequestSoFar | None:
        """Returns what the next daemon needs to continue the request, or None if it cannot be continued."""
        ...

    def write_all(self) -> None:
        """Writes output that was held back because the client reads slowly."""
        ...


@dataclass(slots=True, frozen=True)
class Answering:
    """The functions by which a listener answers requests and errors. body: makes the JSON object of an error. counted: called with
    "" (in place of an endpoint's name) and the HTTP status for each answer to malformed bytes. handle: handles all requests in
    place of the application's router; None: the router handles them."""

    # makes the JSON object of an error
    body: Callable[[HearthError], Mapping[str, Any]]
    # called with the endpoint ("" in this module) and the status when bytes are refused before they are a request
    counted: Callable[[str, int], None] = lambda endpoint, status: None
    # handles all requests in place of the application's router
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None


ANSWERING = web.AppKey("answering", Answering)


class Runner(web.AppRunner):
    """Runs an aiohttp application with a ConnectionServer in place of aiohttp's server. The application's entry ANSWERING contains
    the functions by which it answers."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return ConnectionServer(self.app[ANSWERING], made)


class ConnectionServer(web.Server):
    """The server of an application: makes a Connection for each client that connects."""

    def __init__(self, answering: Answering, made: web.Server) -> None:
        """answering: how requests and errors are answered. made: the server that aiohttp made for the application; this server
        takes over its options and replaces it."""
        super().__init__(
            answering.handle or made.request_handler,  # type: ignore[arg-type]
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )
        self.answering = answering
        # called when a connection has ended; without TLS its socket is still open then
        self.on_lost: Callable[[Connection], None] = _ignore

    def __call__(self) -> Connection:
        return self.connection(_nothing)

    def connection(self, closed: Callable[[], None], before: ConnectionSoFar | None = None) -> Connection:
        """Returns a new connection. closed: called when the connection is closed. before: the connection's state in an earlier
        daemon; None: the client has just connected."""
        options = self._kwargs
        return Connection(self, closed, before, loop=self._loop, max_line_size=HEADER_BYTES, max_field_size=HEADER_BYTES, **options)


def _nothing() -> None:
    pass


def _ignore(connection: Connection) -> None:
    pass


class Connection(web.RequestHandler):
    """The HTTP connection of one client. The head of a request must arrive within HEAD_LIMIT_S seconds, counted from connecting for
    the first request and from the head's first bytes for later ones, even while earlier requests are in progress."""

    __slots__ = (
        "_answering", "_before", "_body", "_body_bytes", "_broken", "_closed", "_head_bytes", "_head_due_s", "_head_parts",
        "_head_timer", "_is_last_look", "_lingering", "_server", "client", "in_progress", "writing_paused",
    )  # fmt: skip
    writing_paused: bool  # an attribute in place of aiohttp's property, because streams read it for every token

    def __init__(
        self, server: ConnectionServer, closed: Callable[[], None], before: ConnectionSoFar | None = None, **options: Any
    ) -> None:
        """closed: called when the connection is closed. before: the connection's state in an earlier daemon; None: the client has
        just connected."""
        super().__init__(server, **options)
        self._server, self._answering, self._closed, self._before = server, server.answering, closed, before
        self.writing_paused = False
        self.client: asyncio.Transport | None = None  # until the connection is lost; `transport` is None from its closing on
        self.in_progress: InProgress | None = None  # set by the handler while the next daemon could continue its request
        self._body: StreamReader = EMPTY_PAYLOAD  # the body of the last request whose head has arrived
        self._body_bytes = 0  # the length of that body by Content-Length; 0: no body, or a chunked one
        self._broken = False  # whether further bytes cannot be parsed as HTTP and are dropped
        self._lingering: asyncio.Future[None] | None = None
        self._head_bytes = 0  # bytes received of a head that is not complete yet
        self._head_parts: list[bytes] = []  # the parts of that head
        self._head_due_s = 0.0  # when the head must be complete, by the loop's clock; 0: no head is expected
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_last_look = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.client = self.transport
        before = self._before
        if before is None or not before.is_used:
            self._await_head()
        elif not before.received:  # the client was idle between two requests
            self._next_keepalive_close_time = self._loop.time() + self.keepalive_timeout
            self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, self._process_keepalive)
        if before is not None and before.received:
            self.data_received(before.received)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._server.on_lost(self)
        self.client = None
        self._closed()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.writing_paused = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self.writing_paused = False

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        num_before, num_body_bytes, is_in_body = self._request_count, self._body.total_bytes, not self._body.is_eof()
        super().data_received(data)
        num_begun = self._request_count - num_before
        if num_begun:
            self._head_bytes, self._head_due_s = 0, 0.0
            self._head_parts.clear()
            for at in range(-num_begun, 0):
                self._on_head(at)
        if self._broken or self._upgraded or self._buffer_paused or not self._body.is_eof():
            return  # no head has begun, or the parser is holding requests back
        if num_begun or (is_in_body and not self._body_bytes):
            part = _behind(data, self._body_bytes)
        else:
            part = data[self._body_bytes - num_body_bytes :] if is_in_body else data
        if part:
            self._on_part_of_head(part)

    def _on_head(self, at: int) -> None:
        """Handles a request's head that has just been parsed: remembers the request's body. After a parse error, or for an HTTP
        version that is not supported, all further bytes are dropped instead. at: the head's index in aiohttp's queue of
        messages."""
        message, body = self._messages[at]
        if isinstance(message, _ErrInfo):
            self._break_off(message.exc)
        elif message.version not in VERSIONS:  # the parser accepts HTTP/0.9 and 2.0 too
            error = BadRequest("invalid_http", "only HTTP/1.1 and HTTP/1.0 are spoken here")
            self._messages[at] = (_ErrInfo(error.status, error, error.message), EMPTY_PAYLOAD)
            self._break_off(error)
        else:
            self._body, self._body_bytes = body, int(message.headers.get("Content-Length", 0))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handles the end of the client's data and returns whether the connection stays open for an answer. It stays open for a
        client that stops in the middle of a request. A client that stops after a whole request is treated as gone, because only a
        write would show whether it still reads."""
        if self._lingering is not None:
            return False
        if not self._body.is_eof():
            self._break_off(None)
        elif self._request_in_progress:
            return False
        elif self._head_bytes and not self._broken:
            self._give_up(BadRequest("invalid_http", "the request ended before its head was whole"))
        return self._broken and self.transport is not None and self.transport.can_write_eof()  # TLS cannot be half-closed

    def close(self) -> None:
        super().close()
        if self._lingering is not None and not self._lingering.done():
            self._lingering.set_result(None)

    # ---- over a restart

    @property
    def server(self) -> ConnectionServer:
        return self._server

    def request_bytes(self, is_last: bool) -> bytes:
        """Returns the bytes of the request that is being answered, so that another connection can read the request again. The
        request's body must have been read. is_last: whether the bytes contain a header that ends that other connection after the
        request."""
        request, progress = self._current_request, self.in_progress
        assert request is not None
        assert progress is not None
        return _again(request, progress, is_last)

    def take_before(self) -> RequestSoFar | None:
        """Returns the state of this connection's first request that an earlier daemon has handed over, or None if there is none. A
        second call returns None."""
        before, self._before = self._before, None
        return before.request if before is not None else None

    def hold_reading(self) -> None:
        """Stops reading, so that the next daemon reads what the client still sends."""
        if self.transport is not None:
            with contextlib.suppress(RuntimeError):  # reading is paused already, or the connection is closing
                self.transport.pause_reading()

    @property
    def is_beginning(self) -> bool:
        """Returns whether the connection cannot be handed over to the next daemon yet, but soon can: either a request has arrived
        and its handler has not set in_progress yet, or a request has ended and the connection does not wait for the next one
        yet."""
        request = self._current_request
        if self._is_ending:
            return False
        if request is None:
            return not self._request_in_progress and not self._is_between_requests
        return self.in_progress is None and request.writer.output_size == 0

    @property
    def _is_ending(self) -> bool:
        transport = self.transport
        return transport is None or transport.is_closing() or self._broken or self._close or self._force_close

    @property
    def has_unsent(self) -> bool:
        """Returns whether written bytes have not reached the kernel yet, or an answer is being written."""
        if self.transport is None:
            return False
        return self.transport.get_write_buffer_size() > 0 or (self._request_in_progress and self._current_request is None)

    def so_far(self) -> ConnectionSoFar | None:
        """Returns what the next daemon needs to continue the connection. Returns None if it cannot be continued: the connection
        uses TLS or is ending, the client does not read or has sent bytes of a further request, or an answer has begun and cannot be
        continued."""
        transport = self.transport
        if transport is None or self._is_ending:
            return None
        if self.has_unsent or self._messages or transport.get_extra_info("sslcontext") is not None:
            return None
        is_used, request = self._request_count > 0, self._current_request
        if request is None:
            return ConnectionSoFar(b"".join(self._head_parts), is_used) if self._is_between_requests else None
        if self.in_progress is None or request.writer.output_size > 0 or self._head_bytes:
            return None
        received = _again(request, self.in_progress)
        so_far = self.in_progress.so_far() if received else None
        return ConnectionSoFar(received, is_used, so_far) if so_far is not None else None

    @property
    def descriptor(self) -> int:
        """Returns the socket's descriptor, which belongs to the transport; -1 if the transport has closed it."""
        assert self.transport is not None
        return int(self.transport.get_extra_info("socket").fileno())

    def let_go(self) -> None:
        """Ends the connection in this daemon, because the next one continues it. Nothing more is written to it."""
        if self.in_progress is not None:
            self.in_progress.is_handed_over = True
        if self.transport is not None:
            self.transport.abort()

    @property
    def _is_between_requests(self) -> bool:
        return self._request_count == 0 or (self._waiter is not None and not self._waiter.done())

    def _on_part_of_head(self, data: bytes) -> None:
        if not self._head_bytes and not data.strip(b"\r\n"):
            return  # some clients send an extra empty line after a body
        self._head_bytes += len(data)
        self._head_parts.append(data)
        if self._head_bytes > HEAD_BYTES:
            self._give_up(BadRequest("headers_too_large", f"the head of the request is longer than {HEAD_BYTES} bytes", status=431))
        elif not self._head_due_s:
            self._await_head()

    def _await_head(self) -> None:
        self._head_due_s = self._loop.time() + HEAD_LIMIT_S
        self._is_last_look = False
        if self._head_timer is None:
            self._head_timer = self._loop.call_at(self._head_due_s, self._look_for_head)

    def _look_for_head(self) -> None:
        self._head_timer = None
        if not self._head_due_s or self._broken:
            return
        if self._loop.time() < self._head_due_s:  # the timer was set for an earlier head
            self._head_timer = self._loop.call_at(self._head_due_s, self._look_for_head)
        elif not self._is_last_look:  # a loop that was delayed runs its timers before it reads the bytes that have arrived
            self._is_last_look = True
            self._head_timer = self._loop.call_later(LOOK_AGAIN_S, self._look_for_head)
        elif self._head_bytes:
            message = f"the head of the request was not in within {HEAD_LIMIT_S:g} s"
            self._give_up(BadRequest("head_timeout", message, status=408))
        else:
            self.force_close()

    def _give_up(self, error: HearthError) -> None:
        """Queues an error as the answer to a request whose head is incomplete, and drops all further bytes."""
        self._broken = True
        self._messages.append((_ErrInfo(error.status, error, error.message), EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _break_off(self, error: BaseException | None) -> None:
        """Drops all further bytes, and makes the handler's reading of the request's body fail. error: why the body cannot be read;
        None if the client ended its data."""
        self._broken = True
        if not self._body.is_eof():  # aiohttp would leave the reader of the body waiting
            what = "it ended early" if error is None else f"its chunked encoding is broken: {_say(error)}"
            self._body.set_exception(web.RequestPayloadError(what))

    def _make_error_handler(self, err_info: _ErrInfo) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
        async def refuse(request: web.BaseRequest) -> web.StreamResponse:
            self._broken = True
            error = refused(err_info.exc)
            log.debug("malformed HTTP from %s: %s", request.remote, error.message)
            return await self._refuse(error)

        return refuse

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Returns the answer to a request whose handler raised an exception. Handlers answer errors of requests themselves, so the
        cause is a fault of the server or a client that is gone. Raises ConnectionResetError if the answer had begun or the
        connection is closed."""
        if exc is not None and not isinstance(exc, ConnectionError):
            self.log_exception("%s %s failed", request.method, request.path, exc_info=exc)
        if request.writer.output_size > 0 or self.transport is None:
            raise ConnectionResetError("the answer had begun")
        return self._answer(ServerFault("internal_error", "the server failed on this request"))

    async def _refuse(self, error: HearthError) -> web.StreamResponse:
        """Writes an error as the answer, then drops incoming bytes until the client closes the connection, at most LINGER_S
        seconds, and returns the answer. A client that is still sending could lose the answer if the server closed the connection
        first."""
        answer = self._answer(error)
        await answer.write_eof()
        if self.transport is not None and not self._close:
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._lingering = self._loop.create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._lingering
        return answer

    def _answer(self, error: HearthError) -> WholeAnswer:
        self._answering.counted("", error.status)
        return WholeAnswer(self, refusal(error, self._answering.body(error), request_id(None)))


def _behind(data: bytes, body_bytes: int) -> bytes:
    """Returns the bytes of `data` after the last whole request in it: the beginning of the next request's head. body_bytes: the
    length of that last request's body; 0 if it has none, or if it is chunked and so ends with an empty line. If the request's end
    cannot be told, because its body contains empty lines or its head began in earlier data, the result may be too short, but never
    contains a part of the request."""
    at = data.rfind(b"\r\n\r\n", 0, max(0, len(data) - body_bytes))
    return data[at + 4 + body_bytes :] if at >= 0 else b""


def _again(request: web.BaseRequest, progress: InProgress, is_last: bool = False) -> bytes:
    """Returns the bytes of a request whose handler has begun, so that the request can be read again. Its body contains the bytes
    that have arrived so far. Returns b"" if a chunked body has not arrived completely, because such a request cannot be continued.
    is_last: whether to add the header that ends the connection after the request."""
    body, is_whole = bytes(progress.body), isinstance(progress.body, bytes) and bool(progress.body)
    if not is_whole:
        is_whole = request.content.is_eof()
        with contextlib.suppress(RuntimeError):  # the handler waits for more, so it has read everything that has arrived
            body += request.content.read_nowait()
    if not is_whole and request.content_length is None:
        return b""
    length = len(body) if is_whole else request.content_length
    lines = [f"{request.method} {request.raw_path} HTTP/{request.version.major}.{request.version.minor}".encode()]
    lines += [b"%b: %b" % (name, value) for name, value in request.raw_headers if name.lower() not in _REWRITTEN]
    if is_last:
        lines = [line for line in lines if not line.lower().startswith(b"connection:")] + [b"Connection: close"]
    lines += [b"X-Request-Id: " + progress.request_id.encode()]
    if length or request.content_length is not None:
        lines.append(b"Content-Length: %d" % (length or 0))
    return b"\r\n".join([*lines, b"", body])


class WholeAnswer(web.StreamResponse):
    """A response that is written as given, head and body in one piece. aiohttp regards it as prepared from the start."""

    def __init__(self, connection: Connection, answer: bytes) -> None:
        super().__init__()
        self._connection, self._answer = connection, answer

    @property
    def prepared(self) -> bool:
        return True

    @property
    def keep_alive(self) -> bool:
        return False

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Writes the whole response to the client, and ends it. A second call does nothing. data: ignored; aiohttp's interface has
        this parameter."""
        answer, self._answer = self._answer, b""
        if answer and self._connection.transport is not None:
            self._connection.transport.write(answer)


def refused(error: BaseException) -> HearthError:
    """Returns the error with which to answer bytes that are not valid HTTP. error: what the HTTP parser raised."""
    if isinstance(error, HearthError):
        return error
    if isinstance(error, LineTooLong):
        if isinstance(error.args[0], bytearray):  # the parser holds an incomplete address as a bytearray
            return BadRequest("uri_too_long", f"the address of the request is longer than {HEADER_BYTES} bytes", status=414)
        message = f"a header of the request is longer than {HEADER_BYTES} bytes"
        return BadRequest("headers_too_large", message, status=431)
    told = _say(error)
    if told.startswith("Too many headers"):
        return BadRequest("headers_too_large", "the request has too many headers", status=431)
    return BadRequest("invalid_http", f"the request is no HTTP/1.1: {told}")


def _say(error: BaseException) -> str:
    """Returns the message of an error of the HTTP parser, without the bytes that it quotes and cut to 200 characters."""
    if isinstance(error, InvalidURLError):
        return "its address is no URL"
    text = " ".join(str(getattr(error, "message", error)).partition("\n\n")[0].split())
    return text.rstrip(":")[:200]
