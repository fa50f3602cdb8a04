"""The interfaces between the parts of a streamed response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from daemon.errors import HearthError

SSE_COMMENT = b": waiting\n\n"


@dataclass(slots=True, frozen=True)
class Frames:
    """The constant parts of one sequence's frames. daemon/api/generation/chunks.py renders those in OpenAI's form."""

    prefix: bytes  # before the text of a chunk
    suffix: bytes  # after the text of a chunk
    first: bytes  # whole frames before the first text (chat: the role)
    usage: Callable[[int], bytes] | None = None  # for continuous usage or logprobs: (tokens so far) -> replacement of `suffix`


class GroupEnd(Protocol):
    """Renders the parts of a response that follow the text of its sequences."""

    def finish(self, index: int, reason: str, num_tokens: int) -> bytes:
        """Returns the chunk with a sequence's finish_reason."""
        ...

    def tail(self, num_tokens: int) -> bytes:
        """Returns the usage chunk, if it was asked for, and [DONE]."""
        ...

    def error(self, error: HearthError) -> bytes: ...


class Connection(Protocol):
    """The part of aiohttp's connection that streams need."""

    @property
    def writing_paused(self) -> bool: ...


@dataclass(slots=True, frozen=True)
class Channel:
    """The connection over which a response reaches its client. head: the status line and headers, which are sent with the first
    frame. chunked: whether each write is a chunk of HTTP/1.1."""

    transport: asyncio.WriteTransport
    connection: Connection
    head: bytes
    chunked: bool


class Member(Protocol):
    """One sequence of a StreamGroup."""

    index: int
    num_tokens: int

    def opened(self, connection: Connection, write: Callable[[bytes], None]) -> None:
        """Called when the response has begun. `write` takes whole HTTP chunks, but only after a first one was written through the
        group."""
        ...

    def flush(self) -> None:
        """Writes pending text, if the client is ready for it."""
        ...

    def close(self) -> None:
        """Ends all writing."""
        ...
