"""Responses that are made in the background (`background: true`): no client's connection holds them, and they survive the daemon.

Their request is read a second time, on a connection without a client (daemon/http/no_client.py), and goes the way of any other from
there. What it takes to go on with it (its bytes, its nonce, the tokens so far) is in memory that the FD store keeps, written as the
tokens come. So the next daemon, which reads the request again and gives it those tokens, makes the same events with the same
numbers, whether the one before it was restarted or killed.
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
NAME = "background"  # in the FD store
CANCELLED, FAILED = "cancelled", "failed"
_EVENT_END = b"\n\n"
_WORD_BYTES = 4  # of the room of a record: the cached tokens, then one word for each token; each is one more than it counts
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_json = msgspec.json.encode


class _Begun(Struct, frozen=True):
    """What is kept of a response in the making, besides its tokens. received: the request's bytes. model: name and fingerprint.
    shown: the response's JSON when it was accepted. is_streamed: whether its events may be fetched. max_tokens: of the reply."""

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
    """A response in the making. Its handler, which has found it by Progress.run, reports to it, as does what renders the response.

    accepted: done once the request is submitted; its error is the request's. events: those so far, by their sequence_number; empty
    unless the response may be fetched as a stream. is_over: nothing will be added. is_held: since the next daemon goes on with it.
    failing: renders the end of a response that fails, and reports it by result(). snapshot: renders the response as it is now."""

    def __init__(self, runs: BackgroundRuns, tenant: str, public_id: str, is_streamed: bool) -> None:
        self._runs, self.tenant, self.public_id, self.is_streamed = runs, tenant, public_id, is_streamed
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events: list[bytes] = []
        self.is_over = self.is_held = False
        self.snapshot: Callable[[], bytes] | None = None
        self.failing: Callable[[HearthError], bytes] | None = None
        self._received = b""  # until it is in the record
        self._shown = b""  # when it was accepted
        self._place: int | None = None  # of its record
        self._result: StoredResponse | None = None
        self._news = asyncio.Event()
        self._client = NoClient(self, self._gone)

    def serve(self, server: ConnectionServer, received: bytes, request: RequestSoFar) -> None:
        """Has the server answer the request. received: its bytes."""
        self._received, self._request = received, request
        self._client.serve(server, received, request)

    # ---- reported by the handler

    def begin(self, generation: Generation) -> None:
        """Keeps the request, which is about to be submitted, and each token that comes. Raises NotNow."""
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
        """Takes note that the request is submitted."""
        if not self.accepted.done():
            self.accepted.set_result(None)

    def connect(self) -> Channel:
        """Returns the way of the events."""
        return Channel(_Events(self), _EVER_READY, b"", chunked=False)

    def write(self, data: bytes) -> None:
        """Takes whole events."""
        if self.is_over:
            return
        if self.is_streamed:
            self.events += split_events(data)
        if self._result is not None:
            self._end()
        self._wake()

    def result(self, response: StoredResponse) -> None:
        """Takes the finished response; the events that are written next are the last."""
        self._result = response

    def fail(self, error: HearthError) -> None:
        """Ends the run by an error, unless it is over."""
        if self.is_over:
            return
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # nobody may be waiting
            self._end()
        elif self.failing is not None:
            self.write(self.failing(error))
        else:  # before there was anything to render it: after a restart
            self._result = self._ended_early(FAILED, error)
            self.write(event("response.failed", len(self.events), response=Raw(self._result.shown)))

    # ---- asked by other requests

    def shown(self) -> bytes:
        """Returns the response's JSON as it is now."""
        return self.snapshot() if self.snapshot is not None else self._shown

    async def wait(self) -> None:
        """Returns when there is a new event, or the run is over."""
        await self._news.wait()

    def cancel(self) -> None:
        """Ends the run because its client wishes so."""
        if self.is_over:
            return
        if self.accepted.done():
            self._result = self._ended_early(CANCELLED, None)
        self._end()
        self._wake()
        self._client.abort()

    # ---- over a restart

    def hold(self) -> None:
        """Stops here, because the next daemon goes on with it."""
        self.is_over = self.is_held = True
        connection = self._client.get_protocol() if not self._client.is_closing() else None
        if isinstance(connection, Connection):
            connection.let_go()
        self._wake()

    def go_on(self, place: int, begun: _Begun, room: bytes, server: ConnectionServer) -> None:
        self._place, self._shown = place, begun.shown
        self.accepted.set_result(None)
        words = array("I", room[: len(room) // _WORD_BYTES * _WORD_BYTES]) or array("I", [0])
        # where the last token that may be is there, its end was not told, so it is made anew
        made = [word - 1 for word in takewhile(bool, words[1:])][: begun.max_tokens - 1]
        sequence = SequenceSoFar(made, num_cached=max(words[0] - 1, 0))
        self.serve(server, begun.received, RequestSoFar(begun.nonce, begun.created, False, True, begun.model, [sequence]))

    def note(self, at: int, ids: Sequence[int], num_cached: int) -> None:
        """Keeps tokens of the reply. at: how many came before them."""
        if self._place is None or self.is_over:
            return
        words = array("I", [token_id + 1 for token_id in ids])
        try:
            if not at:
                self._runs.records.write_room(self._place, 0, array("I", [num_cached + 1]).tobytes())
            self._runs.records.write_room(self._place, _WORD_BYTES * (1 + at), words.tobytes())
        except OSError as error:  # it goes on, but not beyond this daemon
            log.error("%s will not survive a restart: %s", self.public_id, error)
            self._forget()

    def _gone(self) -> None:
        """Ends the run if its handler has ended without a word: the connection is closed."""
        self.fail(ServerFault("internal_error", "The server failed on this request; see its log."))

    def _ended_early(self, status: str, error: HearthError | None) -> StoredResponse:
        told = {"status": status, "error": None if error is None else as_failure(error)}
        shown = _json(_fields_decoder.decode(self.shown()) | told)
        return StoredResponse(self.public_id, self.tenant, "", b"", shown, False, background=True)

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
    """Returns a response's event. number: its sequence_number."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _json({"type": name, **fields, "sequence_number": number}))


def as_failure(error: HearthError) -> dict[str, str]:
    """Returns an error as a failed response shows it."""
    return {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}


class BackgroundRuns:
    """All responses in the making. stored: where the finished ones go. records: of the daemon before this one, for go_on(); None:
    nothing is kept beyond this one."""

    def __init__(self, stored: ResponseStore, records: KeptRecords | None = None) -> None:
        self._stored = stored
        self.records = records if records is not None else KeptRecords()
        self._by_id: dict[tuple[str, str], Run] = {}

    def begin(self, connection: Connection, request: RequestSoFar, tenant: str, public_id: str, is_streamed: bool) -> Run:
        """Begins a run of the request that the connection is answering, whose body is read. request: what is drawn for it."""
        run = self._by_id.get((tenant, public_id))
        if run is None:  # else it was begun before a restart, which the client's connection outlived
            run = self._by_id[tenant, public_id] = Run(self, tenant, public_id, is_streamed)
            run.serve(connection.server, connection.request_bytes(is_last=True), request)
        return run

    def find(self, tenant: str, public_id: str) -> Run | None:
        return self._by_id.get((tenant, public_id))

    def hold(self) -> None:
        """Leaves all runs to the next daemon."""
        for run in self._by_id.values():
            run.hold()

    def go_on(self, server: ConnectionServer) -> int:
        """Goes on with the runs that an earlier daemon has left, and returns how many they are."""
        for place in self.records:
            try:
                begun = _decoder.decode(self.records.read(place))
            except msgspec.DecodeError:  # another version's
                log.warning("a response in the making is lost: another version of hearthd began it")
                self.records.remove(place)
                continue
            if self._stored.knows(begun.tenant, begun.public_id):  # it was killed between two lines
                self.records.remove(place)
                continue
            run = self._by_id[begun.tenant, begun.public_id] = Run(self, begun.tenant, begun.public_id, begun.is_streamed)
            run.go_on(place, begun, self.records.read_room(place), server)
        return len(self._by_id)

    def keep(self, begun: _Begun) -> int:
        return self.records.add(msgspec.msgpack.encode(begun), _WORD_BYTES * (1 + begun.max_tokens))

    def store(self, response: StoredResponse, events: bytes) -> None:
        """Keeps a finished response with its events, or without them where only that has room."""
        with_events = msgspec.structs.replace(response, events=events)
        if not self._stored.add(with_events) and not self._stored.add(response):
            log.warning("%s is larger than stored_responses_bytes, so it is lost", response.public_id)

    def over(self, run: Run) -> None:
        self._by_id.pop((run.tenant, run.public_id), None)


def split_events(packed: bytes) -> list[bytes]:
    """Returns whole events one by one."""
    return [one + _EVENT_END for one in packed.split(_EVENT_END)[:-1]]


class _Noting:
    """The TokenSink of a run: each token makes events of its own, as it will if it is given to the next daemon's sink."""

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
    """The transport over which a run gets its events."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def write(self, data: Any) -> None:
        self._run.write(bytes(data))

    def abort(self) -> None:
        self._run.cancel()


class _EverReady:
    """A connection whose client reads fast enough."""

    writing_paused = False


_EVER_READY = _EverReady()
