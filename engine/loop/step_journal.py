"""Writes the step journal for the engine's loop: the requests that a fault would be blamed on, and the loop's sign of life."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.lifecycle.first_step import NO_REQUESTS, FirstStep
from engine.loop.pulse import Doing, write_pulse
from engine.protocol import write_journal
from scheduler.batch.plan import LongArray


class StepJournal:
    """The writer of one engine's step journal. page: the journal's shared memory (engine.protocol.write_journal). first: model ->
    its first step, which runs in a thread of its own while weights arrive; the journal names the requests of these steps at all
    times."""

    def __init__(self, page: Any, first: Mapping[str, FirstStep]) -> None:
        self._page, self._first = page, first
        self._names_a_step = False

    def beat(self, doing: Doing, expected_s: float = 0.0) -> None:
        """Records that the loop is alive and what it does from now on. expected_s: usual seconds of the step that begins; 0.0 if
        there is none or they are not known."""
        first_since_s = 0.0
        if self._first:
            behind_weights = (first.loaded_s for first in self._first.values() if first.loaded and first.running)
            first_since_s = min(behind_weights, default=0.0)
        write_pulse(self._page, time.monotonic(), expected_s, first_since_s, doing)

    def note(self, request_ids: LongArray, expected_s: float = 0.0) -> None:
        """Records that the loop runs a step with these requests from now on. expected_s: usual seconds of the step; 0.0 if not
        known."""
        self.beat(Doing.STEP, expected_s)
        self.name(request_ids)

    def name(self, request_ids: LongArray) -> None:
        """Writes to the journal the requests that a fault of the engine would be blamed on: `request_ids`, and those of the first
        steps that run in threads."""
        if self._first:
            request_ids = np.concatenate((request_ids, *(first.request_ids for first in self._first.values())))
        write_journal(self._page, request_ids)
        self._names_a_step = True

    def nothing_runs(self) -> None:
        """Removes all requests from the journal, unless a first step may run in a thread. Called when the loop has no step to run.
        Until then the journal keeps the last step's requests, because a fault in the work after a step is blamed on them, too."""
        if self._names_a_step and not self._first:
            write_journal(self._page, NO_REQUESTS)
            self._names_a_step = False
