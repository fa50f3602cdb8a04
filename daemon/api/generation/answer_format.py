"""What differs between the endpoints that generate text: how they render their answers, and a few defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from daemon.api.generation.reply_format import ParsedReply
from daemon.contracts import Generation
from daemon.streams.annotated_text import LogprobTrail, Rendering
from daemon.streams.stream import Collector, Text
from daemon.streams.stream_parts import SSE_COMMENT, Frames, GroupEnd
from daemon.streams.tool_stream import PieceFrames
from daemon.text.tool_parsers.pieces import Piece

EVENT_STREAM = "text/event-stream; charset=utf-8"


@dataclass(slots=True, frozen=True)
class AnswerHead:
    """What is known of an answer when its sequences are submitted. texts: of each sequence. created: Unix time in seconds.
    include_usage, continuous_usage: of a streamed answer, whether usage comes at its end, and with each chunk."""

    public_id: str
    created: int
    model: str
    generations: Sequence[Generation]
    texts: Sequence[Text] = ()
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(slots=True, frozen=True)
class Finished:
    """The sequences of an answer that is not streamed, all of them ended. logprobs: JSON for each. replies: the texts taken apart;
    empty: the text is the reply. prompt_logprobs: JSON for each, or empty."""

    head: AnswerHead
    collectors: Sequence[Collector]
    logprobs: Sequence[bytes]
    replies: Sequence[ParsedReply]
    prompt_logprobs: Sequence[bytes]

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.collectors)


class StreamFormat(GroupEnd, Protocol):
    """Renders a streamed answer."""

    def frames(self, index: int) -> Frames:
        """Returns the constant parts of the frames of a sequence whose text is the reply."""
        ...

    def continued(self, index: int) -> Frames:
        """Returns them for a sequence that pieces() has rendered until now; what is left is text."""
        ...

    def pieces(self, index: int, new_call_id: Callable[[Piece], str]) -> PieceFrames:
        """Returns what renders a sequence's pieces: text, reasoning, tool calls."""
        ...


@dataclass(slots=True, frozen=True)
class AnswerFormat:
    """How an endpoint answers, and what it asks of the shared code.

    id_prefix: how an answer's id begins. prompt_field: the body's field that holds the prompt, for error messages.
    default_max_tokens: None: what the context leaves. takes_replies_apart: tool calls and reasoning are fields of their own.
    shows_end_token: the token that ended the text has log-probabilities, too. one_prompt_report: an answer reports on its
    prompt once, not with each choice. bounds_max_tokens: a max_tokens that the context does not leave is reduced, not refused.
    repeats_text: its last events repeat the text, so a stream renders all of it through pieces(). content_type: of a stream.
    comment: bytes that its clients skip, sent while a stream is silent; empty: it has no comments."""

    id_prefix: str
    prompt_field: str
    default_max_tokens: int | None
    takes_replies_apart: bool
    shows_end_token: bool
    one_prompt_report: bool
    bounds_max_tokens: bool
    logprobs: Callable[[LogprobTrail], Rendering]
    whole: Callable[[Finished], object]
    stream: Callable[[AnswerHead], StreamFormat]
    repeats_text: bool = False
    content_type: str = EVENT_STREAM
    comment: bytes = SSE_COMMENT
