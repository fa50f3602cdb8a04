"""How long the event loop was held at most: a timer that notes how late it runs, on only while requests are open.

A timer every 2 ms costs under 0.5 % of a core while tokens flow and nothing when the node is idle.
"""

from __future__ import annotations

import asyncio
import time

PERIOD_S = 0.002


class LoopWatch:
    """`stall_s`: the longest hold seen so far, to within PERIOD_S."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.stall_s = 0.0

    def start(self) -> None:
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._due_s = time.monotonic() + PERIOD_S
        self._timer = self._loop.call_later(PERIOD_S, self._tick)

    def _tick(self) -> None:
        late_s = time.monotonic() - self._due_s
        if late_s > self.stall_s:
            self.stall_s = late_s
        self._arm()
