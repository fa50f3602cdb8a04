"""The single timer that serves all streamed responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

TICK_S = 0.1
HOLD_STATUS_S = 2.0  # how long a response's status line waits for the first token or a refusal


class Response(Protocol):
    """The part of a streamed response that the clock uses; StreamGroup implements it."""

    behind_since_s: float | None  # since when the client has been reading too slowly; None: it is not
    num_seen: int  # number of tokens when the clock last looked
    has_comments: bool  # whether comments may be sent while the response is silent

    @property
    def num_tokens(self) -> int: ...

    def open(self) -> None: ...

    def comment(self) -> None: ...

    def poll(self) -> None:
        """Writes the text that was held back, if the client is ready for it again."""
        ...

    def stalled(self) -> None:
        """Ends the response, because its client has read nothing for too long."""
        ...


class StreamClock:
    """Opens responses that have waited long enough for their first token, sends comments on silent ones, and checks those whose
    client reads too slowly. The timer runs only while there are responses. Both settings are functions that return seconds:
    comment_every_s, the pause between comments, and stall_timeout_s, how long a client may read nothing."""

    def __init__(self, comment_every_s: Callable[[], float], stall_timeout_s: Callable[[], float]) -> None:
        self._comment_every_s, self._stall_timeout_s = comment_every_s, stall_timeout_s
        self._all: set[Response] = set()
        self._held: dict[Response, float] = {}  # response that is not open yet -> when to open it, earliest first
        self._behind: set[Response] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next_comments_s = 0.0

    def add(self, group: Response) -> None:
        """Adds a response. If it has comments and is not open after HOLD_STATUS_S, it is opened with a comment."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._all.add(group)
        if group.has_comments:
            self._held[group] = now_s + HOLD_STATUS_S
        if self._timer is None:
            self._next_comments_s = now_s + self._comment_every_s()
            self._timer = loop.call_later(TICK_S, self._tick)

    def opened(self, group: Response) -> None:
        self._held.pop(group, None)

    def behind(self, group: Response) -> float:
        self._behind.add(group)
        return asyncio.get_running_loop().time()

    def discard(self, group: Response) -> None:
        self._all.discard(group)
        self._held.pop(group, None)
        self._behind.discard(group)
        if not self._all and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        while self._held and next(iter(self._held.values())) <= now_s:
            group = next(iter(self._held))
            del self._held[group]
            group.open()
            group.comment()
        for group in list(self._behind):
            since_s = group.behind_since_s
            if since_s is not None and now_s - since_s > self._stall_timeout_s():
                group.stalled()
                continue
            group.poll()
            if group.behind_since_s is None:
                self._behind.discard(group)
        if now_s >= self._next_comments_s:
            self._next_comments_s = now_s + self._comment_every_s()
            for group in list(self._all):
                num_tokens = group.num_tokens
                if num_tokens == group.num_seen:
                    group.comment()
                group.num_seen = num_tokens
        self._timer = loop.call_later(TICK_S, self._tick) if self._all else None
