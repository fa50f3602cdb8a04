"""Refuses requests for a while if the workers for a model keep dying at their first job, so that no text of the model was ever
processed.

Once a worker for the model has answered a job, a later death is the fault of one client's text and not of the model's files, so
other clients are not refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from daemon.text.deaths import Death

ALLOWED = 2  # deaths in a row, of workers at their first job, that pause a model
PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
MAX_ENTRIES = 1024


@dataclass(slots=True)
class _Entry:
    count: int
    until_s: float
    death: Death


class RepeatedDeaths:
    """Counts, for each model, the workers that died at their first job, and tells for how long its requests are refused. clock:
    returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[Hashable, _Entry] = {}
        self._sound: dict[Hashable, None] = {}  # models that have answered; a dict as a set that keeps its order

    def add(self, model: Hashable, death: Death) -> None:
        """Counts a worker that the job in progress killed before the worker had answered any job. Once there were ALLOWED such
        workers for the model, begins or prolongs the time in which its requests are refused. Does nothing for a model of which any
        worker has ever answered a job."""
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
        """Returns for how many more seconds the model's requests are refused, and why its last worker died; None if they are not
        refused."""
        entry = self._entries.get(model)
        if entry is None or (left_s := entry.until_s - self._clock()) <= 0:
            return None
        return left_s, entry.death


def _forget_oldest(found: dict[Hashable, Any]) -> None:
    while len(found) > MAX_ENTRIES:
        del found[next(iter(found))]
