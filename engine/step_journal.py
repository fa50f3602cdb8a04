"""The step journal as the engine's loop writes it: whose death it would be, and that the loop lives."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.contracts import LongArray
from engine.protocol import write_journal
from engine.pulse import Doing, write_pulse
from engine.steps.first import NO_REQUESTS, FirstStep


class StepJournal:
    """page: protocol.write_journal's. first: first steps, of which those that run are in any entry."""

    def __init__(self, page: Any, first: Mapping[str, FirstStep]) -> None:
        self._page, self._first = page, first
        self._names_a_step = False

    def beat(self, doing: Doing, expected_s: float = 0.0) -> None:
        """The loop lives and does this from now on. expected_s: of a step, 0.0 where it is not known."""
        first_since_s = 0.0
        if self._first:
            behind_weights = (first.loaded_s for first in self._first.values() if first.loaded and first.running)
            first_since_s = min(behind_weights, default=0.0)
        write_pulse(self._page, time.monotonic(), expected_s, first_since_s, doing)

    def note(self, request_ids: LongArray, expected_s: float = 0.0) -> None:
        """These are in a step from now on."""
        self.beat(Doing.STEP, expected_s)
        self.name(request_ids)

    def name(self, request_ids: LongArray) -> None:
        """These are in a step that runs beside the loop."""
        if self._first:
            request_ids = np.concatenate((request_ids, *(first.request_ids for first in self._first.values())))
        write_journal(self._page, request_ids)
        self._names_a_step = True

    def nothing_runs(self) -> None:
        """Not to be called after every step: a fault in what follows a step is its requests' too."""
        if self._names_a_step and not self._first:
            write_journal(self._page, NO_REQUESTS)
            self._names_a_step = False
