"""Server-sent events of the two endpoints: everything about a chunk but its text is rendered once a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from daemon.api.responses import usage
from daemon.contracts import Generation
from daemon.errors import HearthError
from daemon.stream_parts import Frames

_json = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True, frozen=True)
class StreamShape:
    """What all chunks of one response share. Implements streams.GroupEnd."""

    chat: bool
    public_id: str
    created: int
    model: str
    include_usage: bool
    continuous_usage: bool
    generations: Sequence[Generation]

    def head(self) -> bytes:
        """Up to the choice."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
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
        prompts = self.generations
        return usage(sum(len(each.prompt) for each in prompts), num_tokens, sum(each.num_cached for each in prompts))

    def frames(self, index: int) -> Frames:
        rest = b'},"logprobs":null,"finish_reason":null}' if self.chat else b',"logprobs":null,"finish_reason":null}'
        prefix = self.head() + b'{"index":%d,%b"' % (index, b'"delta":{"content":' if self.chat else b'"text":')
        first = b""
        if self.chat:
            first = self.head() + b'{"index":%d,"delta":{"role":"assistant","content":""' % index + rest + self.tail_of_chunk(0)
        continuous: Callable[[int], bytes] | None = None
        if self.continuous_usage:

            def continuous(num_tokens: int) -> bytes:
                return b'"' + rest + self.tail_of_chunk(num_tokens)

        return Frames(prefix=prefix, suffix=b'"' + rest + self.tail_of_chunk(), first=first, usage=continuous)

    def finish(self, index: int, reason: str, num_tokens: int) -> bytes:
        body = b'"delta":{}' if self.chat else b'"text":""'
        return (
            self.head()
            + b'{"index":%d,%b,"logprobs":null,"finish_reason":"%b"}' % (index, body, reason.encode())
            + self.tail_of_chunk(num_tokens)
        )

    def tail(self, num_tokens: int) -> bytes:
        if not self.include_usage:
            return DONE
        return self.head() + b'],"usage":%b}\n\n' % _json(self._usage(num_tokens)) + DONE

    def error(self, error: HearthError) -> bytes:
        return b"data: %b\n\n" % _json(error.body())
