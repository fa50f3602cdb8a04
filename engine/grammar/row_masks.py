"""Defines the masks of the tokens that the constrained rows of a step may sample. A row is constrained if its request has a grammar
or limits by token id.

Shapes: K constrained rows, W = ceil(V / 32) words of a mask, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.batch.plan import BatchPlan, SequenceTable


@dataclass(slots=True, eq=False)
class LockedMasks:
    """Memory with the masks of several requests that is registered with a device's driver (page-locked), so that the device's copy
    engine can read it. bits [M, W]: M masks of W words. is_locked: whether the memory is still registered; if not, the host copies
    the masks for steps that are launched later."""

    bits: npt.NDArray[np.uint32]
    is_locked: bool = True


@dataclass(slots=True)
class RowMasks:
    """The masks of a step's K constrained rows.
    request_ids: the requests of these rows.
    rows [K]: the rows' indices among the plan's sampling rows, ascending.
    bits [K]: each row's mask [W], whose bit i says that token i is allowed. A device may read a mask until the step's result has
    been read; nobody may write to the mask before. The memory may belong to a grammar process, which later writes the request's
    next masks there.
    locked: page-locked memory in which some of the masks lie; None: there is none.
    places [K]: the index in `locked` of each row's mask; -1 for a mask that lies elsewhere.
    banning [K]: whether the row's end ids are banned in addition to its mask, because of min_tokens; None: no row's are."""

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
    """Returns the indices, among the plan's sampling rows, of the constrained rows: those whose requests have a grammar or limits
    by token id."""
    slots = plan.slots[plan.samples]
    return np.flatnonzero(table.constrained[slots] | table.limited[slots])


def hold_ends_back(bits: npt.NDArray[np.uint32], ids: list[int]) -> None:
    """Clears the bits of the end ids `ids` in one mask [W], in place, so that the text does not end yet. Does not change the mask
    if no other bit is set: then the grammar is at its end, or the request allows no other token."""
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
