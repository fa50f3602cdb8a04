"""Writes the tokens of an engine's steps to the clients' sockets. This is the hot path: one write of one pre-built frame per token,
nothing else.

A `Stream` is the TokenSink of one streamed sequence, a `Collector` that of a sequence answered in one piece. All sequences of a
request form a group (`StreamGroup`, `CollectorGroup`), whose `done` the request's handler awaits. Frames are written to the
transport directly, in chunked encoding if the client uses HTTP/1.1. Each write is a system call, so the headers are sent with the
first frame, and the end of the response with the last. Every token has a frame of its own while the client reads fast enough. While
the transport's buffer is over its limit, the text of further tokens waits in a list (8 bytes a token); it is sent as one frame when
the buffer has drained.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

from daemon.errors import HearthError, ServerFault
from daemon.streams.stream_clock import StreamClock
from daemon.streams.stream_parts import SSE_COMMENT, Channel, Connection, Frames, GroupEnd, Member
from daemon.text.detokenizer import Detokenizer, detokenizer
from daemon.text.header_tokens import HeaderTokens
from daemon.text.stop_strings import StopStrings
from daemon.text.token_table import TokenTable, escape
from engine.protocol import FINISH_ABORT, FINISH_LENGTH, FINISH_NONE, FINISH_STOP

LAST_CHUNK = b"0\r\n\r\n"
REASONS = {FINISH_STOP: "stop", FINISH_LENGTH: "length"}


class Text:
    """Detokenizes one sequence and finds stop strings, for streamed responses and for those in one piece. headers: finds the
    headers of a reply in Harmony (gpt-oss's format), which are not searched for stop strings; None for other replies. num_tokens:
    the tokens so far. matched: whether a stop string was found."""

    __slots__ = ("_detokenizer", "_end_ids", "_headers", "_min_tokens", "_stops", "matched", "num_tokens")

    def __init__(
        self,
        table: TokenTable,
        end_ids: frozenset[int],
        stops: Sequence[str],
        min_tokens: int,
        headers: HeaderTokens | None = None,
    ) -> None:
        self._detokenizer: Detokenizer = detokenizer(table)
        self._end_ids = end_ids
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens
        self._headers = headers
        self.num_tokens = 0
        self.matched = False

    @property
    def stop_string(self) -> str:
        """Returns the stop string that ended the text; "" if none did."""
        return self._stops.found if self._stops is not None else ""

    @property
    def as_in_table(self) -> bool:
        """Returns whether the next token's text is the one in the token table: no stop string has to be looked for, and no
        character is unfinished."""
        return self._stops is None and self._detokenizer.as_in_table

    def add(self, ids: Sequence[int], finish: int) -> str:
        """Adds tokens and returns the text that may be sent now. An unfinished character, and text that may be the beginning of a
        stop string, are held back. If a stop string is found, sets `matched`; the stop string and all text after it are dropped.
        finish: FINISH_NONE, or another FINISH_ value if these are the last tokens."""
        if self._stops is None:
            return self._add(ids, finish)
        parts = []
        # one token at a time, so that num_tokens stops at the token that completed the stop string
        for at in range(len(ids)):
            last = at == len(ids) - 1
            text = self._add(ids[at : at + 1], finish if last else FINISH_NONE)
            in_header = self._headers is not None and self._headers.covers(ids[at])
            if in_header or self.num_tokens <= self._min_tokens:
                parts.append(self._stops.end() + text)
            else:
                parts.append(self._stops.add(text))
                if self._stops.matched:
                    self.matched = True
                    return "".join(parts)
        if finish:
            if not ids:
                parts.append(self._stops.add(self._detokenizer.end()))
                self.matched = self._stops.matched
            parts.append(self._stops.end())
        return "".join(parts)

    def _add(self, ids: Sequence[int], finish: int) -> str:
        self.num_tokens += len(ids)
        # the id that ended the sequence is not part of the answer, whether it is special or not
        if finish == FINISH_STOP and ids and ids[-1] in self._end_ids:
            ids = ids[:-1]
        text = self._detokenizer.add(ids) if ids else ""
        return text + self._detokenizer.end() if finish else text


class Stream:
    """Turns the tokens of one streamed sequence into frames and writes them to the client. It is the sequence's TokenSink."""

    __slots__ = (
        "_connection",
        "_ended",
        "_escaped",
        "_fast",
        "_first",
        "_frames",
        "_group",
        "_overhead",
        "_pending",
        "_prefix",
        "_reason",
        "_suffix",
        "_table",
        "_text",
        "_write",
        "index",
        "num_tokens",
    )  # fmt: skip

    def __init__(self, group: StreamGroup, index: int, table: TokenTable, frames: Frames, text: Text) -> None:
        self._group, self.index, self._table, self._frames, self._text = group, index, table, frames, text
        self._escaped = table.escaped
        self._prefix, self._suffix = frames.prefix, frames.suffix
        self._overhead = len(frames.prefix) + len(frames.suffix)
        self._pending: list[bytes] = []  # escaped text that was not written yet
        self._first = frames.first
        self._fast = self._ended = False
        self._reason = ""  # set once the sequence has ended
        self.num_tokens = 0

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        if self._fast and not finish and len(ids) == 1:
            try:
                text = self._escaped[ids[0]]
                if text and not self._connection.writing_paused:
                    self.num_tokens += 1
                    self._write(b"%x\r\n%b%b%b\r\n" % (self._overhead + len(text), self._prefix, text, self._suffix))
                    return
            except IndexError:  # a token id beyond the vocabulary has no text
                pass
            except RuntimeError:  # the transport is closed, of which the handler is about to be notified
                self._group.lost()
                return
        self._tokens(ids, finish)

    def _tokens(self, ids: Sequence[int], finish: int) -> None:
        if self._ended or self._reason:
            return
        if finish == FINISH_ABORT:
            self.failed(ServerFault("aborted", "the engine gave the request up"))
            return
        state = self._text
        state.num_tokens = self.num_tokens
        text = state.add(ids, finish)
        self.num_tokens = state.num_tokens
        if text:
            self._pending.append(escape(text))
        if state.matched:
            self._reason = "stop"
            if not finish:
                self._group.cancel_one(self.index)
        elif finish:
            self._reason = REASONS[finish]
        self.flush()
        render, escaped = self._table.render, self._escaped
        for token_id in ids:
            if 0 <= token_id < len(escaped) and escaped[token_id] is None:
                render(token_id)

    def flush(self) -> None:
        """Writes the text that was held back while the client read too slowly, if the client is ready for it."""
        group = self._group
        if self._ended or not group.may_write(bool(self._pending or self._reason)):
            self._fast = False
            return
        out = b""
        if self._pending or (self._reason and self._first):
            out, self._first = self._first, b""
        if self._pending:
            usage = self._frames.usage
            out += self._prefix + b"".join(self._pending) + (self._suffix if usage is None else usage(self.num_tokens))
            self._pending.clear()
        if self._reason:
            self._ended, self._fast = True, False
            group.ended(out + group.end.finish(self.index, self._reason, self.num_tokens))
            return
        if out:
            group.write(out)
        self._fast = self._text.as_in_table and self._frames.usage is None and group.chunked and not self._first

    def opened(self, connection: Connection, write: Callable[[bytes], None]) -> None:
        self._connection, self._write = connection, write

    def failed(self, error: HearthError) -> None:
        if not self._ended:
            self._group.fail(error)

    def close(self) -> None:
        self._ended, self._fast = True, False
        self._pending.clear()


class _Ready:
    """A stand-in for a connection whose client is always ready for more."""

    writing_paused = False


class _Discarding(asyncio.WriteTransport):
    """A transport that drops what is written, for frames that the client already has."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass


class StreamGroup:
    """The sequences of one streamed response. The first sequence that has something to write opens the response, that is, sends the
    status line; if none has for some seconds, the StreamClock opens it. `done` is resolved when nothing more will be written, even
    after an error, which is then in `error`."""

    def __init__(
        self,
        end: GroupEnd,
        clock: StreamClock,
        cancel: Callable[[int], None],
        connect: Callable[[], Channel | None],
        comment: bytes = SSE_COMMENT,
    ) -> None:
        """Makes a group without sequences. end: renders the frames after the text. cancel: stops the sequence with this index.
        connect: called once, when the response begins; returns None if the client is gone. comment: bytes to send while the
        response is silent; if it is empty, nothing is sent then, and only a first token or an error opens the response."""
        self.end, self._clock, self._cancel, self._connect, self._comment = end, clock, cancel, connect, comment
        self.streams: list[Member] = []
        self.error: HearthError | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.chunked = True
        self.num_seen = 0  # number of tokens when the clock last looked
        self.behind_since_s: float | None = None
        self.has_comments = bool(comment)
        self._num_ended = 0
        self._head = b""  # the head, until it is written
        self._transport: asyncio.WriteTransport | None = None
        self._connection: Connection | None = None

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def is_open(self) -> bool:
        """Returns whether the response is open. From then on, errors are sent within the stream, because the status is decided."""
        return self._connection is not None

    @property
    def has_begun(self) -> bool:
        """Returns whether any bytes of the response were written."""
        return self._connection is not None and not self._head

    def write_all(self) -> None:
        """Writes all text that was held back, even if the client does not read fast enough for it."""
        connection = self._connection
        if connection is None or self.done.done():
            return
        self._connection = _Ready()
        for stream in list(self.streams):
            stream.flush()
        self._connection = connection

    def replay(self, feed: Callable[[], None]) -> None:
        """Opens the response and calls `feed`, which gives the sequences the tokens whose frames the client already has from an
        earlier daemon. The frames that the sequences write during this call are dropped."""
        self.open()
        transport, connection = self._transport, self._connection
        if transport is None or connection is None:
            return  # the client is gone
        self._transport, self._head = _Discarding(), b""
        for stream in self.streams:
            stream.opened(connection, self._transport.write)
        try:
            feed()
        finally:
            self._transport = transport
            for stream in self.streams:
                stream.opened(connection, transport.write)

    def open(self) -> None:
        if self._connection is not None or self.done.done():
            return
        channel = self._connect()
        if channel is None:
            self.lost()
            return
        self._transport, self._connection, self.chunked, self._head = (
            channel.transport, channel.connection, channel.chunked, channel.head,
        )  # fmt: skip
        self._clock.opened(self)
        for stream in self.streams:
            stream.opened(channel.connection, channel.transport.write)

    def may_write(self, waiting: bool) -> bool:
        if self._connection is None:
            if waiting:
                self.open()
            if self._connection is None:
                return False
        if self._connection.writing_paused:
            if self.behind_since_s is None:
                self.behind_since_s = self._clock.behind(self)
            return False
        return True

    def write(self, data: bytes, after: bytes = b"") -> None:
        """Writes bytes of the body, and the head before the first ones. In a chunked response they become one HTTP chunk. after:
        bytes to send behind that chunk; ignored if the response is not chunked."""
        assert self._transport is not None
        head, self._head = self._head, b""
        try:
            self._transport.write(b"%b%x\r\n%b\r\n%b" % (head, len(data), data, after) if self.chunked else head + data)
        except RuntimeError:
            self.lost()

    def ended(self, out: bytes) -> None:
        """Counts a sequence that has ended, and ends the response after the last one. `out`: the sequence's last frames."""
        self._num_ended += 1
        if self._num_ended == len(self.streams):
            self._end(out + self.end.tail(self.num_tokens))
        else:
            self.write(out)

    def fail(self, error: HearthError) -> None:
        if self.done.done() or self.error is not None:
            return
        self.error = error
        self.cancel_all()
        for stream in self.streams:
            stream.close()
        if self._transport is not None:
            self._end(self.end.error(error))
        else:
            _resolve(self.done)

    def comment(self) -> None:
        if self.has_comments and self._connection is not None and not self.done.done() and not self._connection.writing_paused:
            self.write(self._comment)

    def poll(self) -> None:
        """Writes the text that was held back, if a client that read too slowly is ready again. The clock calls it."""
        if self._connection is None or self._connection.writing_paused:
            return
        self.behind_since_s = None
        for stream in self.streams:
            stream.flush()

    def stalled(self) -> None:
        """Ends the response and cancels its sequences, because the client has read nothing for too long. The clock calls it."""
        self.cancel_all()
        if self._transport is not None:
            self._transport.abort()
        self.lost()

    def lost(self) -> None:
        for stream in self.streams:
            stream.close()
        self.close()
        # deferred: within a step, a cancelled request would count as ended by a stop string
        asyncio.get_running_loop().call_soon(self.cancel_all)

    def cancel_one(self, index: int) -> None:
        self._cancel(index)

    def cancel_all(self) -> None:
        for stream in self.streams:
            self._cancel(stream.index)

    def close(self) -> None:
        """Ends all writing to the client and resolves `done`."""
        self._clock.discard(self)
        for stream in self.streams:
            stream.close()
        _resolve(self.done)

    def _end(self, out: bytes) -> None:
        self.write(out, after=LAST_CHUNK)
        self._clock.discard(self)
        _resolve(self.done)


class Collector:
    """Collects the text of one sequence that is answered in one piece. It is the sequence's TokenSink. parts: the text in parts.
    counts: for each part, the number of tokens from the sequence's beginning to the part's end. reason: the finish_reason, "" until
    the sequence has ended."""

    __slots__ = ("_group", "_text", "counts", "index", "num_tokens", "parts", "reason")

    def __init__(self, group: CollectorGroup, index: int, text: Text) -> None:
        self._group, self._text, self.index = group, text, index
        self.parts: list[str] = []
        self.counts = array("I")
        self.reason = ""
        self.num_tokens = 0

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        if self.reason:
            return
        if finish == FINISH_ABORT:
            self.failed(ServerFault("aborted", "the engine gave the request up"))
            return
        text = self._text.add(ids, finish)
        self.num_tokens = self._text.num_tokens
        if text:
            self.parts.append(text)
            self.counts.append(self.num_tokens)
        if self._text.matched:
            self.reason = "stop"
            if not finish:
                self._group.cancel(self.index)
        elif finish:
            self.reason = REASONS[finish]
        if self.reason:
            self._group.ended()

    def tokens_until(self, num_characters: int) -> int:
        """Returns the number of tokens after which the text has at least `num_characters` characters, or the number of all tokens
        if the text is shorter."""
        for part, count in zip(self.parts, self.counts, strict=True):
            num_characters -= len(part)
            if num_characters <= 0:
                return count
        return self.num_tokens

    def failed(self, error: HearthError) -> None:
        self._group.fail(error)


class CollectorGroup:
    """The sequences of one response that is not streamed. `done` is resolved when all of them have ended, or when one has failed.
    error: the error of the sequence that failed, otherwise None. cancel: stops the sequence with this index."""

    def __init__(self, cancel: Callable[[int], None]) -> None:
        self.cancel = cancel
        self.collectors: list[Collector] = []
        self.error: HearthError | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_ended = 0

    def ended(self) -> None:
        self._num_ended += 1
        if self._num_ended == len(self.collectors):
            _resolve(self.done)

    def fail(self, error: HearthError) -> None:
        if not self.done.done():
            self.error = error
            for collector in self.collectors:
                self.cancel(collector.index)
            _resolve(self.done)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
