"""Measures the longest time for which the event loop was blocked, with a timer that notes how late it fires. It runs only while
requests are open.

The timer fires every `loop_watch_ms`, by default every 5 ms. Each time costs some 15 us while tokens flow (measured: at every 2 ms,
2 % of a core for one slow stream). The measured length of a single block may be up to one period too short; that of a repeated
block is exact. Time in which the thread waited for a core because other programs used all of them is not the daemon's fault, and is
subtracted if the kernel reports it."""

from __future__ import annotations

import asyncio
import os
import threading
import time


class LoopWatch:
    """Measures how long the event loop is blocked. stall_s: the longest block so far in seconds; the true value may be up to
    period_s larger. period_s: the period of the timer that measures it. Must be made in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, period_s: float = 0.005) -> None:
        self._loop, self._period_s = loop, period_s
        self._due_s = 0.0
        self._waited_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.stall_s = 0.0
        try:
            self._fd = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1  # the kernel has no schedstat: waiting for a core counts as blocking

    def start(self) -> None:
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        self.stop()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _waited_for_core_s(self) -> float:
        """Returns for how many seconds since its start the loop's thread was ready to run but had no core; 0.0 if the kernel does
        not report that."""
        return int(os.pread(self._fd, 96, 0).split()[1]) / 1e9 if self._fd >= 0 else 0.0

    def _arm(self) -> None:
        self._waited_s = self._waited_for_core_s()
        self._due_s = time.monotonic() + self._period_s
        self._timer = self._loop.call_later(self._period_s, self._tick)

    def _tick(self) -> None:
        late_s = time.monotonic() - self._due_s
        if late_s > self.stall_s:
            late_s -= self._waited_for_core_s() - self._waited_s
            self.stall_s = max(self.stall_s, late_s)
        self._arm()
