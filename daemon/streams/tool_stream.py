"""The streamed sequence of a request with tools or reasoning. Its text is split into pieces (reasoning, content, tool calls) as it
arrives. Other requests use Stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from daemon.errors import HearthError, ServerFault
from daemon.streams.stream import REASONS, Stream, StreamGroup, Text
from daemon.streams.stream_parts import Connection
from daemon.text.reply_parser import ReplyParser
from daemon.text.tool_parsers.pieces import ARGUMENTS, CONTENT, REASONING, Piece
from engine.protocol import FINISH_ABORT, FINISH_LENGTH

TOOL_CALLS = "tool_calls"  # finish_reason of a reply with a complete call
_JOINED = frozenset({CONTENT, REASONING, ARGUMENTS})


class PieceFrames(Protocol):
    """Renders each piece of a reply as a whole frame. first: frames to send before the first piece."""

    first: bytes

    def render(self, piece: Piece, num_tokens: int) -> bytes: ...


class ToolStream:
    """Parses the tokens of one streamed sequence with tools or reasoning, and writes each piece of the reply as a frame. It is the
    sequence's TokenSink and a member of a StreamGroup.

    If the client reads too slowly, consecutive pieces of one kind are sent as one. plain: makes the Stream that takes over once the
    reasoning has ended, for replies whose content needs no parsing; None: the whole reply is parsed."""

    __slots__ = (
        "_connection", "_ended", "_first", "_frames", "_group", "_heir", "_parser", "_pending", "_plain", "_reason", "_text",
        "_write", "index", "num_tokens",
    )  # fmt: skip

    def __init__(
        self,
        group: StreamGroup,
        index: int,
        frames: PieceFrames,
        text: Text,
        parser: ReplyParser,
        plain: Callable[[], Stream] | None,
    ) -> None:
        self._group, self.index, self._frames, self._text, self._parser = group, index, frames, text, parser
        self._plain = plain
        self._heir: Stream | None = None
        self._pending: list[Piece] = []
        self._first = frames.first
        self._ended = False
        self._reason = ""
        self.num_tokens = 0

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        if self._heir is not None:
            self._heir.tokens(ids, finish)
            return
        if self._ended or self._reason:
            return
        if finish == FINISH_ABORT:
            self.failed(ServerFault("aborted", "the engine gave the request up"))
            return
        text = self._text.add(ids, finish)
        self.num_tokens = self._text.num_tokens
        if text:
            self._pending += self._parser.add(text)
        if self._text.matched or finish:
            cut = finish == FINISH_LENGTH and not self._text.matched
            self._pending += self._parser.end(cut)
            self._reason = finish_reason("stop" if self._text.matched else REASONS[finish], self._parser.num_calls)
            if not finish:
                self._group.cancel_one(self.index)
        self.flush()
        if self._plain is not None and self._parser.is_through and not (self._pending or self._first or self._ended):
            self._hand_over(self._plain())

    def _hand_over(self, heir: Stream) -> None:
        self._heir = heir
        heir.num_tokens = self.num_tokens
        self._group.streams[self.index] = heir
        heir.opened(self._connection, self._write)
        heir.flush()

    def flush(self) -> None:
        group = self._group
        if self._ended or not group.may_write(bool(self._pending or self._reason)):
            return
        out = b""
        if self._pending or self._reason:
            out, self._first = self._first, b""
        for piece in self._pending if len(self._pending) < 2 else _joined(self._pending):
            out += self._frames.render(piece, self.num_tokens)
        self._pending.clear()
        if self._reason:
            self._ended = True
            group.ended(out + group.end.finish(self.index, self._reason, self.num_tokens))
        elif out:
            group.write(out)

    def opened(self, connection: Connection, write: Callable[[bytes], None]) -> None:
        self._connection, self._write = connection, write

    def failed(self, error: HearthError) -> None:
        if self._heir is not None:
            self._heir.failed(error)
        elif not self._ended:
            self._group.fail(error)

    def close(self) -> None:
        self._ended = True
        self._pending.clear()


def finish_reason(reason: str, num_calls: int) -> str:
    """Returns OpenAI's finish_reason of a reply: "tool_calls" if it has ended with "stop" and has complete calls, else `reason`.
    num_calls: the number of its complete tool calls."""
    return TOOL_CALLS if reason == "stop" and num_calls else reason


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Returns the pieces of a reply, with the texts of consecutive pieces joined if they are of one kind and belong to the same
    call."""
    joined: list[Piece] = []
    texts: list[str] = []
    for piece in pieces:
        if joined and piece.kind in _JOINED and joined[-1].kind == piece.kind and joined[-1].call == piece.call:
            texts.append(piece.text)
            continue
        if len(texts) > 1:
            joined[-1] = joined[-1]._replace(text="".join(texts))
        joined.append(piece)
        texts = [piece.text]
    if len(texts) > 1:
        joined[-1] = joined[-1]._replace(text="".join(texts))
    return joined
