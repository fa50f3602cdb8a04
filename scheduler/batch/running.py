"""Tracks the running sequences. The array of their slots stays the same object while the sequences stay the same, so that results
for it can be reused.

Shapes: S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.batch.plan import IntArray, SequenceTable
from scheduler.batch.request import BatchRequest


class Running:
    """The running sequences of a sequence table with S slots. slots: their slots in the order of admission; the array is replaced
    when the sequences change, and never changed in place. requests [S]: the request in each slot, a list that the batch scheduler
    owns."""

    def __init__(self, table: SequenceTable, requests: Sequence[BatchRequest | None]) -> None:
        self.slots: IntArray = np.zeros(0, np.int32)
        self._table, self._requests = table, requests
        self._decode: IntArray | None = None  # the result of `split` while every sequence decodes and none joins or leaves

    def __len__(self) -> int:
        return len(self.slots)

    def join(self, slot: int) -> None:
        self.slots = np.append(self.slots, np.int32(slot))

    def drop_gone(self) -> None:
        """Removes the slots whose sequences have left, that is, whose request id in the table is 0."""
        self.slots = self.slots[self._table.request_id[self.slots] != 0]

    def split(self, slots: IntArray, computed: IntArray, total: IntArray) -> tuple[IntArray, IntArray]:
        """Returns (slots with one token to compute, slots with more). slots: those to split. computed, total [S]: each sequence's
        computed tokens and all its tokens."""
        if slots is self._decode:
            return slots, slots[:0]
        decodes = total[slots] - computed[slots] == 1
        if decodes.all():
            self._decode = slots
            return slots, slots[:0]
        return slots[decodes], slots[~decodes]

    def requests(self) -> list[tuple[int, BatchRequest]]:
        """Returns a pair (slot, request) for each running sequence, the oldest first."""
        return [(slot, request) for slot in self.slots.tolist() if (request := self._requests[slot]) is not None]

    def victim(self, tenant: str | None) -> int:
        """Returns the slot of the sequence to preempt: the newest one of the lowest priority. tenant: the tenant with the most
        running sequences for its weight, whose sequences alone are considered; None: all are."""
        running = self.requests()
        if tenant is not None:
            running = [(slot, request) for slot, request in running if request.tenant == tenant]
        return min(running, key=lambda each: (each[1].priority, -each[1].order))[0]
