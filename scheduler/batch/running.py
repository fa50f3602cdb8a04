"""The sequences that run. While they are the same, so is the array of their slots: what was found of it need not be looked for
again, step after step.

Shapes: S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.batch.plan import IntArray, SequenceTable
from scheduler.batch.request import BatchRequest


class Running:
    """slots: in order of admission; never changed in place. requests [S]: of the table's rows, the batch scheduler's own."""

    def __init__(self, table: SequenceTable, requests: Sequence[BatchRequest | None]) -> None:
        self.slots: IntArray = np.zeros(0, np.int32)
        self._table, self._requests = table, requests
        self._decode: IntArray | None = None  # slots that are known to decode, as they go on doing

    def __len__(self) -> int:
        return len(self.slots)

    def join(self, slot: int) -> None:
        self.slots = np.append(self.slots, np.int32(slot))

    def drop_gone(self) -> None:
        """Those whose slot has no request any more."""
        self.slots = self.slots[self._table.request_id[self.slots] != 0]

    def split(self, slots: IntArray, computed: IntArray, total: IntArray) -> tuple[IntArray, IntArray]:
        """Of some of them, those that have one token to compute, and those that have more. computed, total [S]: tokens."""
        if slots is self._decode:
            return slots, slots[:0]
        decodes = total[slots] - computed[slots] == 1
        if decodes.all():
            self._decode = slots
            return slots, slots[:0]
        return slots[decodes], slots[~decodes]

    def requests(self) -> list[tuple[int, BatchRequest]]:
        """(slot, request), the oldest first."""
        return [(slot, request) for slot in self.slots.tolist() if (request := self._requests[slot]) is not None]

    def victim(self, tenant: str | None) -> int:
        """The slot of the newest sequence of the lowest priority: of a tenant that crowds others out, if there is one, its own
        excess makes room, whatever priority it gives itself."""
        running = self.requests()
        if tenant is not None:
            running = [(slot, request) for slot, request in running if request.cache_salt == tenant]
        return min(running, key=lambda each: (each[1].priority, -each[1].order))[0]
