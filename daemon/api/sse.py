"""Server-sent events of the two endpoints: everything about a chunk but its text is rendered once a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from daemon.api.logprobs import NULL, logprobs_json
from daemon.api.responses import usage_of
from daemon.contracts import Generation
from daemon.errors import HearthError
from daemon.stream_parts import Frames

_json = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class StreamShape:
    """What all chunks of one response share. Implements streams.GroupEnd."""

    chat: bool
    public_id: str
    created: int
    model: str
    include_usage: bool
    continuous_usage: bool
    generations: Sequence[Generation]
    head: bytes = field(init=False)  # of every chunk, up to the choice

    def __post_init__(self) -> None:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        self.head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            _json(self.public_id),
            kind.encode(),
            self.created,
            _json(self.model),
        )

    def tail_of_chunk(self, num_tokens: int | None = None) -> bytes:
        """After the choice. OpenAI sends `"usage": null` on every chunk before the one that has it."""
        if num_tokens is not None and self.continuous_usage:
            return b'],"usage":%b}\n\n' % _json(self._usage(num_tokens))
        return b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"

    def _usage(self, num_tokens: int) -> dict[str, object]:
        return usage_of(self.generations, num_tokens)

    def rest_of_choice(self, index: int, reason: bytes = NULL) -> bytes:
        """After the delta or the text, with the log-probabilities of what was sent since the last time."""
        return b',"logprobs":%b,"finish_reason":%b}' % (logprobs_json(self.generations[index].logprobs, self.chat), reason)

    def frames(self, index: int) -> Frames:
        end = b"}" if self.chat else b""
        rest = end + b',"logprobs":null,"finish_reason":null}'
        prefix = self.head + b'{"index":%d,%b"' % (index, b'"delta":{"content":' if self.chat else b'"text":')
        first = b""
        if self.chat:
            first = self.head + b'{"index":%d,"delta":{"role":"assistant","content":""' % index + rest + self.tail_of_chunk(0)
        continuous: Callable[[int], bytes] | None = None
        if self.continuous_usage or self.generations[index].logprobs is not None:

            def continuous(num_tokens: int) -> bytes:
                return b'"' + end + self.rest_of_choice(index) + self.tail_of_chunk(num_tokens)

        return Frames(prefix=prefix, suffix=b'"' + rest + self.tail_of_chunk(), first=first, usage=continuous)

    def finish(self, index: int, reason: str, num_tokens: int) -> bytes:
        body = b'"delta":{}' if self.chat else b'"text":""'
        return (
            self.head
            + b'{"index":%d,%b' % (index, body)
            + self.rest_of_choice(index, b'"%b"' % reason.encode())
            + self.tail_of_chunk(num_tokens)
        )

    def tail(self, num_tokens: int) -> bytes:
        if not self.include_usage:
            return DONE
        return self.head + b'],"usage":%b}\n\n' % _json(self._usage(num_tokens)) + DONE

    def error(self, error: HearthError) -> bytes:
        return b"data: %b\n\n" % _json(error.body())
