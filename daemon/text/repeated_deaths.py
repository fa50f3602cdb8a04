"""Models whose texts were never done, because each worker for them ended at its first job: requests are refused for a while.

Of a model that has answered once, a client's text is at fault and never the model's files: nobody else is refused for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

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
        self._sound: dict[Hashable, None] = {}  # models that have answered; a set that keeps its order

    def add(self, model: Hashable, death: Death) -> None:
        """A worker has ended that had answered nothing yet, through the job it was at."""
        if model in self._sound:
            return
        entry = self._entries.pop(model, None)
        count = 1 if entry is None else entry.count + 1
        pause_s = 0.0 if count < ALLOWED else min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(count - ALLOWED, 10))
        self._entries[model] = _Entry(count, self._clock() + pause_s, death)
        _forget_oldest(self._entries)

    def answered(self, model: Hashable) -> None:
        if model not in self._sound:
            self._entries.pop(model, None)
            self._sound[model] = None
            _forget_oldest(self._sound)

    def pause(self, model: Hashable) -> tuple[float, Death] | None:
        """For how many more seconds its requests are refused, and what its last worker ended with."""
        entry = self._entries.get(model)
        if entry is None or (left_s := entry.until_s - self._clock()) <= 0:
            return None
        return left_s, entry.death


def _forget_oldest(found: dict[Hashable, Any]) -> None:
    while len(found) > MAX_ENTRIES:
        del found[next(iter(found))]
