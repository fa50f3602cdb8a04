"""Renders the deltas of a streamed chat with tools or reasoning as server-sent events. Everything in an event but its text is
rendered only once per stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from daemon.streams.stream_parts import Frames
from daemon.text.token_table import escape
from daemon.text.tool_parsers.pieces import ARGUMENTS, CALL, CALL_END, REASONING, Piece


class Chunks(Protocol):
    """The protocol of the object that makes the parts of a chunk around its delta, as PieceFrames needs it; implemented by the
    class Chunks of generation/chunks.py."""

    @property
    def head(self) -> bytes: ...

    def frames(self, index: int) -> Frames: ...

    def rest_of_choice(self, index: int) -> bytes: ...

    def tail_of_chunk(self, num_tokens: int) -> bytes: ...


class PieceFrames:
    """Renders the pieces of one sequence of a chat as chunks in OpenAI's form. index: the sequence's index in the answer.
    new_call_id: makes the id of a tool call from its CALL piece."""

    __slots__ = ("_chunks", "_end", "_head", "_index", "_new_call_id", "first")

    def __init__(self, chunks: Chunks, index: int, new_call_id: Callable[[Piece], str]) -> None:
        self._chunks, self._index, self._new_call_id = chunks, index, new_call_id
        self._head = chunks.head + b'{"index":%d,"delta":{' % index
        plain = chunks.frames(index)
        self.first = plain.first
        # the end of a frame without log-probabilities and usage
        self._end = plain.suffix[1:] if plain.usage is None else None

    def render(self, piece: Piece, num_tokens: int) -> bytes:
        if piece.kind == CALL_END:
            return b""
        if piece.kind == CALL:
            call = b'"tool_calls":[{"index":%d,"id":"%b","type":"function","function":{"name":%b,"arguments":""}}]'
            delta = call % (piece.call, self._new_call_id(piece).encode(), msgspec.json.encode(piece.text))
        elif piece.kind == ARGUMENTS:
            delta = b'"tool_calls":[{"index":%d,"function":{"arguments":"%b"}}]' % (piece.call, escape(piece.text))
        else:
            delta = b'"%b":"%b"' % (b"reasoning_content" if piece.kind == REASONING else b"content", escape(piece.text))
        if self._end is not None:
            return self._head + delta + self._end
        return self._head + delta + b"}" + self._chunks.rest_of_choice(self._index) + self._chunks.tail_of_chunk(num_tokens)
