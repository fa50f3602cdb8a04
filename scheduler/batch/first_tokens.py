"""What is told once of a request, with its first token or the next one after it came back: where its prompt's KV came from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.batch.plan import BoolArray, IntArray, SequenceTable, StepOutcome
from scheduler.batch.request import BatchRequest


class FirstTokens:
    """A column beside the sequence table; requests [S]: of its rows, the batch scheduler's own."""

    def __init__(self, table: SequenceTable, requests: Sequence[BatchRequest | None]) -> None:
        self._table, self._requests = table, requests
        self._wanted: BoolArray = np.zeros(len(requests), np.bool_)

    def join(self, slot: int, request: BatchRequest) -> None:
        self._wanted[slot] = request.resubmitted or not request.has_first_token

    def note(self, slots: IntArray, outcome: StepOutcome) -> None:
        """These slots have a new token."""
        first = slots[self._wanted[slots]]
        if not len(first):
            return
        self._wanted[first] = self._table.prompt_logprobs[first] = False
        for slot in first.tolist():
            request = self._requests[slot]
            assert request is not None
            request.has_first_token = True
            if request.resubmitted:
                request.resubmitted = False
                outcome.resumed[request.request_id] = (request.num_cached, request.num_recomputed)
            elif request.num_cached:
                outcome.cached[request.request_id] = request.num_cached
