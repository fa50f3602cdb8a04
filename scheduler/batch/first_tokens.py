"""Reports how many tokens of a request's prompt were cached, once per request: with its first token, or with the next token after
the request was submitted again.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.batch.plan import IntArray, SequenceTable, StepOutcome
from scheduler.batch.request import BatchRequest


class FirstTokens:
    """Remembers the requests for which the number of cached tokens has not been reported yet. requests [S]: the request in each of
    S slots of a sequence table, a list that the batch scheduler owns."""

    def __init__(self, table: SequenceTable, requests: Sequence[BatchRequest | None]) -> None:
        self._table, self._requests = table, requests
        self._wanted: set[int] = set()  # slots that have not reported yet

    def join(self, slot: int, request: BatchRequest) -> None:
        if request.resubmitted or not request.has_first_token:
            self._wanted.add(slot)

    def leave(self, slot: int) -> None:
        self._wanted.discard(slot)

    def note(self, slots: IntArray, outcome: StepOutcome) -> None:
        """Adds to `outcome`, for each request in these slots that got its first token, the time at which it was admitted and the
        number of cached tokens of its prompt. For the first token after a resubmission, adds instead how many tokens were cached
        and how many were computed again."""
        if not self._wanted:
            return
        for slot in slots.tolist():
            if slot not in self._wanted:
                continue
            self._wanted.remove(slot)
            self._table.prompt_logprobs[slot] = False
            request = self._requests[slot]
            assert request is not None
            request.has_first_token = True
            if request.resubmitted:
                request.resubmitted = False
                outcome.resumed[request.request_id] = (request.num_cached, request.num_recomputed)
                continue
            if request.num_cached:
                outcome.cached[request.request_id] = request.num_cached
            if request.began_s:
                outcome.began_s[request.request_id] = request.began_s
