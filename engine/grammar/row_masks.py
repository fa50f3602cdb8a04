"""Defines the masks of the tokens that the constrained rows of a step may sample.

Shapes: K constrained rows, W = ceil(V / 32) words of a mask, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.batch.plan import BatchPlan, SequenceTable


@dataclass(slots=True)
class RowMasks:
    """rows [K]: indices of the constrained rows among the plan's sampling rows, ascending. bits [K, W]: if bit i of a row is set,
    token i is allowed."""

    request_ids: list[int]
    rows: npt.NDArray[np.intp]
    bits: npt.NDArray[np.uint32]

    def allowed(self, at: slice, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Returns the masks of index range `at` as booleans [len(at), V]."""
        return np.unpackbits(self.bits[at].view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def constrained_rows(plan: BatchPlan, table: SequenceTable) -> npt.NDArray[np.intp]:
    """Returns the indices, among the plan's sampling rows, of the rows that may not sample every token."""
    slots = plan.slots[plan.samples]
    return np.flatnonzero(table.constrained[slots] | table.limited[slots])


def hold_ends_back(bits: npt.NDArray[np.uint32], ids: list[int]) -> None:
    """Clears the bits of `ids` in one mask [W], in place, unless no other bit is set: then the grammar is at its end, or the
    request allows no other token."""
    without = bits.copy()
    clear(without, ids)
    if without.any():
        bits[:] = without


def holds_any(bits: npt.NDArray[np.uint32], ids: Iterable[int]) -> bool:
    """Returns whether one mask [W] has the bit of any of `ids` set."""
    return any(bits[each >> 5] & np.uint32(1 << (each & 31)) for each in ids if 0 <= each < 32 * len(bits))


def clear(bits: npt.NDArray[np.uint32], ids: Iterable[int]) -> None:
    """Clears the bits of `ids` in one mask [W], in place."""
    for each in ids:
        if 0 <= each < 32 * len(bits):
            bits[each >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (each & 31)))
