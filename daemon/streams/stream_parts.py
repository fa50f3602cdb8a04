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
    """The constant parts of one sequence's frames. prefix, suffix: the bytes before and after the text of a frame. first: whole
    frames before the first text, such as the role of a chat. usage: takes the number of tokens so far and returns the bytes that
    replace `suffix` in the next frame; None: `suffix` is used."""

    prefix: bytes  # before the text of a chunk
    suffix: bytes  # after the text of a chunk
    first: bytes  # whole frames before the first text (chat: the role)
    usage: Callable[[int], bytes] | None = None  # for continuous usage or logprobs: (tokens so far) -> replacement of `suffix`


class GroupEnd(Protocol):
    """Renders the parts of a response that follow the text of its sequences."""

    def finish(self, index: int, reason: str, num_tokens: int) -> bytes:
        """Returns the frame with a sequence's finish_reason. index: the sequence's number in the response."""
        ...

    def tail(self, num_tokens: int) -> bytes:
        """Returns the last frames of the response: the usage, if it was asked for, and [DONE]. num_tokens: of all sequences."""
        ...

    def error(self, error: HearthError) -> bytes: ...


class Connection(Protocol):
    """The part of aiohttp's connection that streams need. writing_paused: whether the client reads too slowly, so that the
    transport's buffer is over its limit."""

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
    """One streamed sequence, as its StreamGroup uses it. index: its number in the response. num_tokens: its tokens so far."""

    index: int
    num_tokens: int

    def opened(self, connection: Connection, write: Callable[[bytes], None]) -> None:
        """Tells the sequence that the response has begun. write: sends a whole HTTP chunk; it may be used only after the group has
        written a first one, with the response's head."""
        ...

    def flush(self) -> None:
        """Writes the text that was held back, if the client is ready for it."""
        ...

    def close(self) -> None:
        """Ends all writing of this sequence, and drops the text that was held back."""
        ...
