"""The running sequences. The array of their slots stays the same object while they do, so that results for it can be reused.

Shapes: S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.batch.plan import IntArray, SequenceTable
from scheduler.batch.request import BatchRequest


class Running:
    """The running sequences. slots: in order of admission, never changed in place. requests [S]: of the table's rows, shared with
    the batch scheduler."""

    def __init__(self, table: SequenceTable, requests: Sequence[BatchRequest | None]) -> None:
        self.slots: IntArray = np.zeros(0, np.int32)
        self._table, self._requests = table, requests
        self._decode: IntArray | None = None  # slots that are known to decode, as they go on doing

    def __len__(self) -> int:
        return len(self.slots)

    def join(self, slot: int) -> None:
        self.slots = np.append(self.slots, np.int32(slot))

    def drop_gone(self) -> None:
        """Removes slots that have no request any more."""
        self.slots = self.slots[self._table.request_id[self.slots] != 0]

    def split(self, slots: IntArray, computed: IntArray, total: IntArray) -> tuple[IntArray, IntArray]:
        """Splits slots into those with one token to compute and those with more. computed, total [S]: tokens."""
        if slots is self._decode:
            return slots, slots[:0]
        decodes = total[slots] - computed[slots] == 1
        if decodes.all():
            self._decode = slots
            return slots, slots[:0]
        return slots[decodes], slots[~decodes]

    def requests(self) -> list[tuple[int, BatchRequest]]:
        """Returns (slot, request), the oldest first."""
        return [(slot, request) for slot in self.slots.tolist() if (request := self._requests[slot]) is not None]

    def victim(self, tenant: str | None) -> int:
        """Returns the slot of the newest sequence of the lowest priority. If one tenant crowds the others out, the victim is one
        of its own, whatever priority they have."""
        running = self.requests()
        if tenant is not None:
            running = [(slot, request) for slot, request in running if request.tenant == tenant]
        return min(running, key=lambda each: (each[1].priority, -each[1].order))[0]
