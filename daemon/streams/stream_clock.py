"""The one timer that serves all streamed responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

TICK_S = 0.1
HOLD_STATUS_S = 2.0  # how long a response's status line waits for the first token or a refusal


class Response(Protocol):
    """A streamed response; a StreamGroup."""

    behind_since_s: float | None  # None: the client takes what is written
    num_seen: int  # tokens when the clock looked last
    has_comments: bool  # which may be sent while it is silent

    @property
    def num_tokens(self) -> int: ...

    def open(self) -> None: ...

    def comment(self) -> None: ...

    def poll(self) -> None:
        """Writes what waits if the client is ready again."""
        ...

    def stalled(self) -> None:
        """Gives a client up that has taken nothing for too long."""
        ...


class StreamClock:
    """Opens responses that have waited long enough for their first token, sends comments on silent ones, and checks those whose
    client reads too slowly. The timer runs only while there are responses."""

    def __init__(self, comment_every_s: Callable[[], float], stall_timeout_s: Callable[[], float]) -> None:
        self._comment_every_s, self._stall_timeout_s = comment_every_s, stall_timeout_s
        self._all: set[Response] = set()
        self._held: dict[Response, float] = {}  # not open yet -> when to open them, earliest first
        self._behind: set[Response] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next_comments_s = 0.0

    def add(self, group: Response) -> None:
        """Adds a response. One that has comments is opened with the first of them after HOLD_STATUS_S, if it is not open yet."""
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
