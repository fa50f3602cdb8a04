"""The one timer of all streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daemon.streams import StreamGroup

TICK_S = 0.1


class StreamClock:
    """Comments on silent streams and looks after those whose client is behind. Runs only while a stream is open."""

    def __init__(self, comment_every_s: Callable[[], float], stall_timeout_s: Callable[[], float]) -> None:
        self._comment_every_s, self._stall_timeout_s = comment_every_s, stall_timeout_s
        self._open: set[StreamGroup] = set()
        self._behind: set[StreamGroup] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next_comments_s = 0.0

    def add(self, group: StreamGroup) -> None:
        self._open.add(group)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._next_comments_s = loop.time() + self._comment_every_s()
            self._timer = loop.call_later(TICK_S, self._tick)

    def behind(self, group: StreamGroup) -> float:
        self._behind.add(group)
        return asyncio.get_running_loop().time()

    def discard(self, group: StreamGroup) -> None:
        self._open.discard(group)
        self._behind.discard(group)
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
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
            for group in list(self._open):
                num_tokens = group.num_tokens
                if num_tokens == group.num_seen:
                    group.comment()
                group.num_seen = num_tokens
        self._timer = loop.call_later(TICK_S, self._tick) if self._open else None
