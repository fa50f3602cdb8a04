"""The differences between the endpoints that generate text: how they render their answers, and a few defaults."""

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
    """The facts about an answer that are known when its sequences are submitted. public_id: the answer's id. texts: the Text of
    each sequence, which turns its tokens into text. created: Unix time in seconds. include_usage, continuous_usage: whether a
    streamed answer has the usage at its end, and in each chunk."""

    public_id: str
    created: int
    model: str
    generations: Sequence[Generation]
    texts: Sequence[Text] = ()
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(slots=True, frozen=True)
class Finished:
    """The results of a request without streaming, all of whose sequences have ended. collectors: the text and finish reason of each
    sequence. replies: the parsed reply of each sequence; empty if replies are not parsed. logprobs: the JSON of each sequence's
    log-probabilities. prompt_logprobs: the same for each sequence's prompt, or empty."""

    head: AnswerHead
    collectors: Sequence[Collector]
    logprobs: Sequence[bytes]
    replies: Sequence[ParsedReply]
    prompt_logprobs: Sequence[bytes]

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.collectors)


class StreamFormat(GroupEnd, Protocol):
    """Renders a streamed answer: makes the bytes of its events from each sequence's text, or from the pieces (text, reasoning, tool
    calls) into which its reply is parsed."""

    def frames(self, index: int) -> Frames:
        """Returns the constant parts of the events of a sequence that is sent as plain text, not in pieces. index: the sequence's
        index in the answer."""
        ...

    def continued(self, index: int) -> Frames:
        """Returns the constant parts of the events of a sequence whose beginning was sent in pieces and whose remaining text is
        plain. index: the sequence's index in the answer."""
        ...

    def pieces(self, index: int, new_call_id: Callable[[Piece], str]) -> PieceFrames:
        """Returns the renderer of a sequence whose reply is parsed into pieces: text, reasoning, tool calls. new_call_id: makes the
        id of a call from its CALL piece."""
        ...


@dataclass(slots=True, frozen=True)
class AnswerFormat:
    """The form of an endpoint's answers, and its options for the code that all text endpoints share.

    id_prefix: the prefix of an answer's id. prompt_field: the body's field that holds the prompt, for error messages. content_type:
    the type of a stream. comment: bytes that clients skip, sent while a stream is silent; empty: there are no comments.

    default_max_tokens: the most tokens of a reply if neither the request nor the model sets a limit; None: all that the context
    leaves. takes_replies_apart: whether replies are parsed, so that tool calls and reasoning are fields of their own.
    shows_end_token: whether the token that ended the text has log-probabilities, too. one_prompt_report: whether an answer reports
    on its prompt once, not with each choice. bounds_max_tokens: whether a max_tokens that the context cannot hold is reduced;
    otherwise it is refused. repeats_text: whether the last events of a stream repeat its whole text, which is why the renderer of
    pieces (StreamFormat.pieces) then gets all of it.

    logprobs: makes the renderer of a choice's log-probabilities. whole: makes the answer of a request without streaming. stream:
    makes the renderer of a streamed answer."""

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
