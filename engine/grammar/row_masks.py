"""Defines the masks of the tokens that the constrained rows of a step may sample.

Shapes: K constrained rows, W = ceil(V / 32) words of a mask, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.batch.plan import BatchPlan, SequenceTable


@dataclass(slots=True, eq=False)
class LockedMasks:
    """Memory with the masks of several requests that is registered with a device's driver (page-locked), so that the device's copy
    engine reads it. bits [M, W]. is_locked: whether it still is; a copy that is launched later is the host's."""

    bits: npt.NDArray[np.uint32]
    is_locked: bool = True


@dataclass(slots=True)
class RowMasks:
    """The masks of a step's constrained rows. request_ids: the requests of these K rows. rows [K]: the rows' indices among the
    plan's sampling rows, ascending. bits [K]: each row's mask [W], whose bit i says that token i is allowed. They may lie in memory
    that a grammar's process writes the rows' next masks to, and a device may read them until the step has ended. So nobody writes
    them before the step's result was read. locked: page-locked memory in which some of them lie; None: there is none. places [K]:
    which of its masks each of them is, -1 for those that lie elsewhere. banning [K]: the rows whose end ids are banned besides,
    as rows without a mask ban theirs before min_tokens; None: no row's are."""

    request_ids: list[int]
    rows: npt.NDArray[np.intp]
    bits: list[npt.NDArray[np.uint32]]
    locked: LockedMasks | None = None
    places: npt.NDArray[np.int32] | None = None
    banning: npt.NDArray[np.bool_] | None = None

    def allowed(self, at: slice, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Returns the masks of the constrained rows in slice `at` as booleans [rows, V]; True: the token is allowed."""
        return np.unpackbits(np.stack(self.bits[at]).view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def constrained_rows(plan: BatchPlan, table: SequenceTable) -> npt.NDArray[np.intp]:
    """Returns the indices, among the plan's sampling rows, of the rows that may not sample every token, because of a grammar or of
    limits by token id."""
    slots = plan.slots[plan.samples]
    return np.flatnonzero(table.constrained[slots] | table.limited[slots])


def hold_ends_back(bits: npt.NDArray[np.uint32], ids: list[int]) -> None:
    """Clears the bits of the end ids `ids` in one mask [W], in place, so that the text does not end yet. Leaves the mask alone if
    no other bit is set: then the grammar is at its end, or the request allows no other token."""
    if allows_others(bits, ids):
        clear(bits, ids)


def allows_others(bits: npt.NDArray[np.uint32], ids: Iterable[int]) -> bool:
    """Returns whether a mask [W] allows any token besides the token ids `ids`."""
    without = bits.copy()
    clear(without, ids)
    return bool(without.any())


def holds_any(bits: npt.NDArray[np.uint32], ids: Iterable[int]) -> bool:
    """Returns whether the bit of any of the token ids `ids` is set in one mask [W]."""
    return any(bits[each >> 5] & np.uint32(1 << (each & 31)) for each in ids if 0 <= each < 32 * len(bits))


def clear(bits: npt.NDArray[np.uint32], ids: Iterable[int]) -> None:
    """Clears the bits of the token ids `ids` in one mask [W], in place. Ids outside the vocabulary are ignored."""
    for each in ids:
        if 0 <= each < 32 * len(bits):
            bits[each >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (each & 31)))
