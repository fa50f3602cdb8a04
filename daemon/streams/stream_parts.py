"""What the parts of a streamed response are to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from daemon.errors import HearthError


@dataclass(slots=True, frozen=True)
class Frames:
    """The parts of one sequence's SSE frames that never change; daemon/api/generation/chunks.py renders them."""

    prefix: bytes  # up to the text of a chunk
    suffix: bytes  # after it
    first: bytes  # whole frames before the first text (chat: the role)
    usage: Callable[[int], bytes] | None = None  # continuous usage or logprobs: (tokens so far) -> suffix instead of `suffix`


class GroupEnd(Protocol):
    """Renders what follows the sequences' own text."""

    def finish(self, index: int, reason: str, num_tokens: int) -> bytes:
        """The chunk with the finish_reason."""
        ...

    def tail(self, num_tokens: int) -> bytes:
        """The usage chunk if asked for, and [DONE]."""
        ...

    def error(self, error: HearthError) -> bytes: ...


class Connection(Protocol):
    """What is needed of aiohttp's connection."""

    @property
    def writing_paused(self) -> bool: ...


@dataclass(slots=True, frozen=True)
class Channel:
    """A response's way to its client. head: status line and headers, which go out with the first frame. chunked: each write is a
    chunk of HTTP/1.1."""

    transport: asyncio.WriteTransport
    connection: Connection
    head: bytes
    chunked: bool


class Member(Protocol):
    """A sequence of a StreamGroup."""

    index: int
    num_tokens: int

    def opened(self, connection: Connection, write: Callable[[bytes], None]) -> None:
        """The response has begun: `write` takes whole chunks, behind a first one that goes through the group."""
        ...

    def flush(self) -> None:
        """Write what waits, if the client is ready for it."""
        ...

    def close(self) -> None:
        """Nothing more is written."""
        ...
