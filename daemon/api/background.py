"""Generates responses in the background (`background: true`). They need no client's connection, and they survive the daemon.

The bytes of such a request are read again on a connection without a client (daemon/http/no_client.py), and from there the request
is handled like any other. Everything needed to continue it (its bytes, its nonce, the tokens so far) is written, as the tokens
arrive, to memory that the service manager keeps open for the next daemon (its FD store). The next daemon reads the request again,
starts with those tokens, and so generates the same events with the same numbers, whether this daemon was restarted or killed.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import msgspec
from msgspec import Raw, Struct

from daemon.api.response_store import ResponseStore, StoredResponse
from daemon.contracts import Generation, TokenSink
from daemon.errors import HearthError, NotNow, ServerFault
from daemon.http.connection import Connection, ConnectionServer
from daemon.http.no_client import NoClient
from daemon.process.kept_records import KeptRecords
from daemon.streams.so_far import RequestSoFar, SequenceSoFar
from daemon.streams.stream_parts import Channel
from engine.protocol import FINISH_NONE

log = logging.getLogger("hearthd.api")
NAME = "background"  # the name in the FD store
CANCELLED, FAILED = "cancelled", "failed"
_EVENT_END = b"\n\n"
_WORD_BYTES = 4  # a record's room holds words: the number of cached tokens, then the token ids; each word is its value plus one
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_json = msgspec.json.encode


class _Begun(Struct, frozen=True):
    """The record of a background response that is kept for the next daemon; its tokens are kept beside it. received: the bytes of
    the HTTP request. nonce: random bytes, from which all further random values of the request are derived. created: Unix time in
    seconds. model: name and fingerprint. shown: the response's JSON when it was accepted. is_streamed: whether its events may be
    fetched. max_tokens: the most tokens of the reply."""

    public_id: str
    tenant: str
    received: bytes
    nonce: bytes
    created: int
    model: tuple[str, str]
    shown: bytes
    is_streamed: bool
    max_tokens: int


_decoder = msgspec.msgpack.Decoder(_Begun)


class Run:
    """A background response in progress. Two objects report to it: the handler of its request, which finds it as Progress.run, and
    the renderer of the response.

    accepted: a future that is done when the request was submitted; it has an exception if the request was refused. events: the
    events so far, indexed by sequence_number; empty if the client did not ask for a stream. is_over: whether no more events will be
    added in this daemon. is_held: whether the next daemon continues the response. previous: the id of the response that this one
    follows, or "". input: the request's field `input`, as JSON. snapshot: renders the response so far as JSON; None before there is
    a renderer. failing: renders the last events of a failed response, and passes the response to result()."""

    def __init__(self, runs: BackgroundRuns, tenant: str, public_id: str, is_streamed: bool) -> None:
        self._runs, self.tenant, self.public_id, self.is_streamed = runs, tenant, public_id, is_streamed
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events: list[bytes] = []
        self.is_over = self.is_held = False
        self.snapshot: Callable[[], bytes] | None = None
        self.failing: Callable[[HearthError], bytes] | None = None
        self.previous = ""
        self.input = b""
        self._received = b""  # the request's bytes, until they are in the record
        self._shown = b""  # the response's JSON when it was accepted
        self._place: int | None = None  # the place of its record
        self._result: StoredResponse | None = None
        self._news = asyncio.Event()
        self._client = NoClient(self, self._gone)

    def serve(self, server: ConnectionServer, received: bytes, request: RequestSoFar) -> None:
        """Makes `server` handle the request, on a connection without a client. received: the bytes of the HTTP request. request:
        the nonce of its random values, and the tokens that an earlier daemon has generated for it, if any."""
        self._received, self._request = received, request
        self._client.serve(server, received, request)

    # ---- reported by the handler

    def begin(self, generation: Generation) -> None:
        """Writes a record of the request for the next daemon, and from then on each token of its reply. It is called just before
        the request is submitted. generation: the request's only sequence; its sink is replaced by one that also writes the tokens
        to the record. Raises NotNow if the record cannot be written."""
        assert self.snapshot is not None
        if self._place is None:
            self._shown = self.snapshot()
            begun = _Begun(
                self.public_id, self.tenant, self._received, self._request.nonce, self._request.created, generation.model.identity,
                self._shown, self.is_streamed, generation.params.max_tokens,
            )  # fmt: skip
            try:
                self._place = self._runs.keep(begun)
            except OSError as error:
                raise NotNow("overloaded", f"the request cannot be kept: {error}") from error
            self._received = b""
        generation.sink = _Noting(self, generation, generation.sink)

    def accept(self) -> None:
        """Marks `accepted` as done, because the request was submitted."""
        if not self.accepted.done():
            self.accepted.set_result(None)

    def connect(self) -> Channel:
        """Returns a channel for the renderer of the response: what is written to it becomes events of this run."""
        return Channel(_Events(self), _EVER_READY, b"", chunked=False)

    def write(self, data: bytes) -> None:
        """Adds events to `events`, if the response may be fetched as a stream, and wakes those who wait for them. The call after
        result() brings the last events and ends the run. Does nothing if the run is over. data: whole server-sent events,
        joined."""
        if self.is_over:
            return
        if self.is_streamed:
            self.events += split_events(data)
        if self._result is not None:
            self._end()
        self._wake()

    def result(self, response: StoredResponse) -> None:
        """Records the finished response. The next call of write() brings its last events; then the run ends and the response is
        stored."""
        self._result = response

    def fail(self, error: HearthError) -> None:
        """Ends the run with an error, unless it is over: `accepted` gets the error if the request was not accepted yet, otherwise
        the response gets the status `failed` and an event that says so."""
        if self.is_over:
            return
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # marks the error as retrieved: perhaps nothing waits for it
            self._end()
        elif self.failing is not None:
            self.write(self.failing(error))
        else:  # after a restart there may be no renderer yet
            self._result = self._ended_early(FAILED, error)
            self.write(event("response.failed", len(self.events), response=Raw(self._result.shown)))

    # ---- asked by other requests

    def shown(self) -> bytes:
        """Returns the JSON of the response so far."""
        return self.snapshot() if self.snapshot is not None else self._shown

    async def wait(self) -> None:
        """Waits until there is a new event or the run is over."""
        await self._news.wait()

    def cancel(self) -> None:
        """Ends the run because the client asks for it, and aborts its request. A response that was accepted is stored with the
        status `cancelled`."""
        if self.is_over:
            return
        if self.accepted.done():
            self._result = self._ended_early(CANCELLED, None)
        self._end()
        self._wake()
        self._client.abort()

    # ---- over a restart

    def hold(self) -> None:
        """Stops the run in this daemon without ending the response: the next daemon continues it."""
        self.is_over = self.is_held = True
        connection = self._client.get_protocol() if not self._client.is_closing() else None
        if isinstance(connection, Connection):
            connection.let_go()
        self._wake()

    def go_on(self, place: int, begun: _Begun, room: bytes, server: ConnectionServer) -> None:
        self._place, self._shown = place, begun.shown
        self.accepted.set_result(None)
        words = array("I", room[: len(room) // _WORD_BYTES * _WORD_BYTES]) or array("I", [0])
        # if all max_tokens are there, the last one is generated again, because its finish reason was not kept
        made = [word - 1 for word in takewhile(bool, words[1:])][: begun.max_tokens - 1]
        sequence = SequenceSoFar(made, num_cached=max(words[0] - 1, 0))
        self.serve(server, begun.received, RequestSoFar(begun.nonce, begun.created, False, True, begun.model, [sequence]))

    def note(self, at: int, ids: Sequence[int], num_cached: int) -> None:
        """Writes down tokens of the reply for the next daemon. at: the number of the reply's tokens before `ids`. num_cached: the
        number of the prompt's tokens that were in the prefix cache."""
        if self._place is None or self.is_over:
            return
        words = array("I", [token_id + 1 for token_id in ids])
        try:
            if not at:
                self._runs.records.write_room(self._place, 0, array("I", [num_cached + 1]).tobytes())
            self._runs.records.write_room(self._place, _WORD_BYTES * (1 + at), words.tobytes())
        except OSError as error:  # the run continues, but does not survive this daemon
            log.error("%s will not survive a restart: %s", self.public_id, error)
            self._forget()

    def _gone(self) -> None:
        """Ends the run with an error if its handler has closed the connection without an answer."""
        self.fail(ServerFault("internal_error", "The server failed on this request; see its log."))

    def _ended_early(self, status: str, error: HearthError | None) -> StoredResponse:
        told = {"status": status, "error": None if error is None else as_failure(error)}
        shown = _json(_fields_decoder.decode(self.shown()) | told)
        return StoredResponse(self.public_id, self.tenant, self.previous, b"", shown, False, background=True, input=self.input)

    def _end(self) -> None:
        self.is_over = True
        if self._result is not None:
            self._runs.store(self._result, b"".join(self.events))
        self._forget()
        self._runs.over(self)

    def _forget(self) -> None:
        if self._place is not None:
            self._runs.records.remove(self._place)
            self._place = None

    def _wake(self) -> None:
        self._news.set()
        if not self.is_over:
            self._news = asyncio.Event()


def event(name: str, number: int, /, **fields: object) -> bytes:
    """Returns a server-sent event of the Responses API. name: its type. number: its sequence_number. fields: its further JSON
    fields."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _json({"type": name, **fields, "sequence_number": number}))


def as_failure(error: HearthError) -> dict[str, str]:
    """Returns the `error` object of a failed response, {"code", "message"}."""
    return {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}


class BackgroundRuns:
    """All background responses in progress. stored: the store of finished responses. records: the memory that keeps the responses
    in progress for the next daemon, and from which go_on() continues those of an earlier daemon; None: responses in progress are
    lost with this daemon."""

    def __init__(self, stored: ResponseStore, records: KeptRecords | None = None) -> None:
        self._stored = stored
        self.records = records if records is not None else KeptRecords()
        self._by_id: dict[tuple[str, str], Run] = {}

    def begin(self, connection: Connection, request: RequestSoFar, tenant: str, public_id: str, is_streamed: bool) -> Run:
        """Returns the run of a background response. It starts a new run, unless an earlier daemon began the response and this
        daemon continues it already. connection: the connection that has just received the request. request: the nonce of its random
        values. public_id: the response's id. is_streamed: whether its events may be fetched."""
        run = self._by_id.get((tenant, public_id))
        if run is None:  # otherwise the run began before a restart, which the client's connection survived
            run = self._by_id[tenant, public_id] = Run(self, tenant, public_id, is_streamed)
            run.serve(connection.server, connection.request_bytes(is_last=True), request)
        return run

    def find(self, tenant: str, public_id: str) -> Run | None:
        return self._by_id.get((tenant, public_id))

    def hold(self) -> None:
        """Stops all runs, so that the next daemon continues them."""
        for run in self._by_id.values():
            run.hold()

    def go_on(self, server: ConnectionServer) -> int:
        """Continues the runs that an earlier daemon has kept in `records`. server: handles their requests. Returns the number of
        runs in progress."""
        for place in self.records:
            try:
                begun = _decoder.decode(self.records.read(place))
            except msgspec.DecodeError:  # written by another version of hearthd
                log.warning("a response in the making is lost: another version of hearthd began it")
                self.records.remove(place)
                continue
            if self._stored.knows(begun.tenant, begun.public_id):  # the daemon was killed before it removed the record
                self.records.remove(place)
                continue
            run = self._by_id[begun.tenant, begun.public_id] = Run(self, begun.tenant, begun.public_id, begun.is_streamed)
            run.go_on(place, begun, self.records.read_room(place), server)
        return len(self._by_id)

    def keep(self, begun: _Begun) -> int:
        return self.records.add(msgspec.msgpack.encode(begun), _WORD_BYTES * (1 + begun.max_tokens))

    def store(self, response: StoredResponse, events: bytes) -> None:
        """Stores a finished response together with its events, or without them if the store has no room for both. A response that
        does not fit even so is lost, which is logged. events: whole server-sent events, joined."""
        with_events = msgspec.structs.replace(response, events=events)
        if not self._stored.add(with_events) and not self._stored.add(response):
            log.warning("%s is larger than stored_responses_bytes, so it is lost", response.public_id)

    def over(self, run: Run) -> None:
        self._by_id.pop((run.tenant, run.public_id), None)


def split_events(packed: bytes) -> list[bytes]:
    """Splits joined server-sent events into a list of single events, each with the empty line at its end."""
    return [one + _EVENT_END for one in packed.split(_EVENT_END)[:-1]]


class _Noting:
    """The TokenSink that writes a run's tokens to its record and passes them on to the sink of the answer. It passes on one token
    at a time, as the next daemon does with the recorded tokens, so that both daemons make the same events."""

    __slots__ = ("_at", "_generation", "_run", "_sink")

    def __init__(self, run: Run, generation: Generation, sink: TokenSink) -> None:
        self._run, self._generation, self._sink = run, generation, sink
        self._at = len(generation.output)

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        if len(ids) < 2:
            self._sink.tokens(ids, finish)
        else:
            last = len(ids) - 1
            for at, token_id in enumerate(ids):
                self._sink.tokens((token_id,), finish if at == last else FINISH_NONE)
        self._run.note(self._at, ids, self._generation.num_cached)
        self._at += len(ids)

    def failed(self, error: HearthError) -> None:
        self._sink.failed(error)


class _Events(asyncio.WriteTransport):
    """An asyncio transport in place of a client's connection: bytes that are written to it become events of a run, and abort()
    cancels the run."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def write(self, data: Any) -> None:
        self._run.write(bytes(data))

    def abort(self) -> None:
        self._run.cancel()


class _EverReady:
    """A substitute for the protocol of a client's connection, which tells a channel that writing is never paused: a background
    response has no client that could read too slowly."""

    writing_paused = False


_EVER_READY = _EverReady()
