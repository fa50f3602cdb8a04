"""Renders OpenAI's chunks as server-sent events. Everything in a chunk but its text is rendered only once per stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from daemon.api.generation.answer_format import AnswerHead
from daemon.api.generation.logprobs import NULL, logprobs_json
from daemon.api.generation.piece_frames import PieceFrames
from daemon.api.generation.usage import usage_of
from daemon.errors import HearthError
from daemon.streams.annotated_text import LogprobTrail, Rendering
from daemon.streams.stream_parts import Frames
from daemon.text.tool_parsers.pieces import Piece

_json = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True, frozen=True)
class ChunkFormat:
    """The parts of a streamed chunk that differ between chats and completions. object: the value of the chunk's field `object`.
    opening, closing: JSON of a choice before and after its text. first: JSON of the choice in the chunk before the first text;
    empty: there is no such chunk. last: JSON of the choice in the chunk with the finish_reason."""

    object: str
    opening: bytes
    closing: bytes
    first: bytes
    last: bytes
    logprobs: Callable[[LogprobTrail], Rendering]


@dataclass(slots=True)
class Chunks:
    """Renders the chunks of one streamed answer in OpenAI's form. Implements answer_format.StreamFormat."""

    format: ChunkFormat
    answer: AnswerHead
    head: bytes = field(init=False)  # the beginning of every chunk, up to the choice

    def __post_init__(self) -> None:
        answer = self.answer
        self.head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            _json(answer.public_id),
            _json(self.format.object),
            answer.created,
            _json(answer.model),
        )

    def tail_of_chunk(self, num_tokens: int | None = None) -> bytes:
        """Returns the end of a chunk, after the choice. It contains the usage if the client wants it in each chunk and num_tokens
        is given; else `"usage":null` if the client wants the usage at the end, as in OpenAI's streams. num_tokens: the tokens
        generated so far."""
        if num_tokens is not None and self.answer.continuous_usage:
            return b'],"usage":%b}\n\n' % self._usage(num_tokens)
        return b'],"usage":null}\n\n' if self.answer.include_usage else b"]}\n\n"

    def _usage(self, num_tokens: int) -> bytes:
        return _json(usage_of(self.answer.generations, num_tokens))

    def rest_of_choice(self, index: int, reason: bytes = NULL) -> bytes:
        """Returns the end of a choice, after the delta or the text, with the log-probabilities of the tokens since the last chunk.
        reason: the finish_reason as JSON."""
        trail = self.answer.generations[index].logprobs
        logprobs = NULL if trail is None else logprobs_json(trail, self.format.logprobs)
        return b',"logprobs":%b,"finish_reason":%b}' % (logprobs, reason)

    def frames(self, index: int) -> Frames:
        form = self.format
        rest = form.closing + b',"logprobs":null,"finish_reason":null}'
        first = b""
        if form.first:
            first = self.head + b'{"index":%d,%b' % (index, form.first) + rest + self.tail_of_chunk(0)
        continuous: Callable[[int], bytes] | None = None
        if self.answer.continuous_usage or self.answer.generations[index].logprobs is not None:

            def continuous(num_tokens: int) -> bytes:
                return b'"' + form.closing + self.rest_of_choice(index) + self.tail_of_chunk(num_tokens)

        return Frames(
            prefix=self.head + b'{"index":%d,%b"' % (index, form.opening),
            suffix=b'"' + rest + self.tail_of_chunk(),
            first=first,
            usage=continuous,
        )

    def continued(self, index: int) -> Frames:
        return replace(self.frames(index), first=b"")

    def pieces(self, index: int, new_call_id: Callable[[Piece], str]) -> PieceFrames:
        return PieceFrames(self, index, new_call_id)

    def finish(self, index: int, reason: str, num_tokens: int) -> bytes:
        return (
            self.head
            + b'{"index":%d,%b' % (index, self.format.last)
            + self.rest_of_choice(index, b'"%b"' % reason.encode())
            + self.tail_of_chunk(num_tokens)
        )

    def tail(self, num_tokens: int) -> bytes:
        if not self.answer.include_usage:
            return DONE
        return self.head + b'],"usage":%b}\n\n' % self._usage(num_tokens) + DONE

    def error(self, error: HearthError) -> bytes:
        return b"data: %b\n\n" % _json(error.body())
