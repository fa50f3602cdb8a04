"""Which tokens the constrained rows of a step may draw.

Shapes: K constrained rows, W = ceil(V / 32) words of a mask, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.batch.plan import BatchPlan, SequenceTable


@dataclass(slots=True)
class RowMasks:
    """rows [K]: places among the plan's sampling rows, ascending · bits [K, W]: bit i of a row set: token i may come."""

    request_ids: list[int]
    rows: npt.NDArray[np.intp]
    bits: npt.NDArray[np.uint32]

    def allowed(self, at: slice, vocab_size: int) -> npt.NDArray[np.bool_]:
        """[len(at), V] of the masks `at`."""
        return np.unpackbits(self.bits[at].view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def constrained_rows(plan: BatchPlan, table: SequenceTable) -> npt.NDArray[np.intp]:
    """Places of the constrained rows among the plan's sampling rows."""
    return np.flatnonzero(table.constrained[plan.slots[plan.samples]])


def hold_ends_back(bits: npt.NDArray[np.uint32], ids: list[int]) -> None:
    """Clears `ids` in one mask [W], in place, unless nothing else is left in it: then the grammar is at its end."""
    without = bits.copy()
    for each in ids:
        if 0 <= each < 32 * len(bits):
            without[each >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (each & 31)))
    if without.any():
        bits[:] = without
