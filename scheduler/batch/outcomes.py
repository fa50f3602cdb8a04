"""Turns the tokens that a step sampled into its outcome (StepOutcome): the request of each token, which sequences end, and what is
reported with a first token.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.batch.endings import Endings
from scheduler.batch.first_tokens import FirstTokens
from scheduler.batch.plan import IntArray, Sampling, SequenceTable, StepOutcome
from scheduler.batch.request import BatchRequest


class Outcomes:
    """Makes a StepOutcome from the tokens that each step of a sequence table sampled. end_ids: the model's end ids. requests [S]:
    the request in each of S slots, a list that the batch scheduler owns."""

    def __init__(self, end_ids: Sequence[int], table: SequenceTable, requests: Sequence[BatchRequest | None]) -> None:
        self._table = table
        self._endings = Endings(end_ids, table)
        self._first_tokens = FirstTokens(table, requests)
        self._named: tuple[IntArray | None, list[int]] = (None, [])  # slots of the latest step, and the ids of the requests in them

    def join(self, slot: int, request: BatchRequest, params: Sampling) -> None:
        """Registers the sequence in a slot, whose columns in the sequence table are set already. request, params: its request and
        the sampling settings of that."""
        self._endings.join(slot, params)
        self._first_tokens.join(slot, request)

    def leave(self, slot: int) -> None:
        self._endings.leave(slot)
        self._first_tokens.leave(slot)

    @property
    def endings(self) -> Endings:
        return self._endings

    def of(self, slots: IntArray, ids: list[int], failed: list[int], running: IntArray, most: int = 1) -> StepOutcome:
        """Returns the outcome of a step.

        ids: the newest token of each sequence in `slots`, already in the table. failed: ids of requests that ended without a token.
        running: slots of all running sequences. most: the most tokens that any sequence got in the step.

        While the same sequences sample, the caller may pass the same array as `slots`, which saves work."""
        if slots is not self._named[0]:
            self._named = slots, self._table.request_id[slots].tolist()
        outcome = StepOutcome(self._named[1], ids, self._endings.finishes(slots, ids, running, most), failed)
        self._first_tokens.note(slots, outcome)
        return outcome
