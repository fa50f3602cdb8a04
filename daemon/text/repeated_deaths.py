"""Models whose text workers end before they have done anything, again and again: their requests are refused for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from daemon.text.deaths import Death

ALLOWED = 2  # in a row, workers that ended with their first job
PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
MAX_ENTRIES = 1024


@dataclass(slots=True)
class _Entry:
    count: int
    until_s: float
    death: Death


class RepeatedDeaths:
    """By model. The clock is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[Hashable, _Entry] = {}

    def add(self, model: Hashable, death: Death) -> None:
        """A worker has ended that had answered nothing yet, through the job it was at."""
        entry = self._entries.pop(model, None)
        count = 1 if entry is None else entry.count + 1
        pause_s = 0.0 if count < ALLOWED else min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(count - ALLOWED, 10))
        self._entries[model] = _Entry(count, self._clock() + pause_s, death)
        while len(self._entries) > MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]

    def answered(self, model: Hashable) -> None:
        if self._entries:
            self._entries.pop(model, None)

    def pause(self, model: Hashable) -> tuple[float, Death] | None:
        """For how many more seconds its requests are refused, and what its last worker ended with."""
        entry = self._entries.get(model)
        if entry is None or (left_s := entry.until_s - self._clock()) <= 0:
            return None
        return left_s, entry.death
