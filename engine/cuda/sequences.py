"""Keeps the state of a model's sequences that stays on the GPU between steps: block tables by slot, and the last token of each
slot. The host sends changes of this state in one copy for each step. The file also copies a step's input columns (arrays of per-row
or per-token values) to the device.

Shapes: S slots (places of running sequences), B blocks a sequence may hold. Slot S belongs to no sequence: padding rows point at
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cuda.kernels import entry
from scheduler.batch.plan import IntArray, SequenceTable

WORD_BYTES, ALIGN_WORDS = 4, 4
ALIGN_BYTES = WORD_BYTES * ALIGN_WORDS
NUM_STAGING = 8  # copies that may be under way at a time: those of two steps and one more


class Group(NamedTuple):
    """Arrays of one dtype of 4-byte items that are sent one after the other. num_words: number of items in all. is_locked: the
    group is a single int32 array or tensor in page-locked memory, of which what the step reads stays unchanged until the step has
    ended, so the device copies from there by itself. Only the last groups of a column may be locked."""

    arrays: Sequence[Any]
    num_words: int
    is_locked: bool = False


# An array of 4-byte or 8-byte items. Or, if it is the last of the columns, groups of arrays that lie one after the other in it.
Column = npt.NDArray[Any] | list[Group]


class Staging:
    """Copies input columns from the host to the device in one asynchronous copy, from page-locked memory if the device is a GPU. A
    group of arrays that is page-locked already (Group.is_locked) takes a copy of its own. num_buffers: how many copies may be under
    way at a time; the next one waits for the oldest."""

    def __init__(self, device: torch.device, num_buffers: int = NUM_STAGING) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.int32)] * num_buffers
        # The part of each buffer that was used last, and its length: most steps use it again, and torch takes long to make another.
        self._parts = [(0, buffer) for buffer in self._buffers]
        self._copied: list[Any] = [None] * num_buffers
        self._next = 0

    def page_locked(self, num_words: int) -> Tensor:
        """Returns new int32 memory on the host, page-locked if the device is a GPU."""
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=self._pinned)

    def send(self, columns: Mapping[str, Column], into: Tensor | None = None) -> dict[str, Tensor]:
        """Copies columns to the device and returns them as tensors there, by their names. into: int32 memory on the device that
        receives the columns one after the other, each aligned to 16 bytes; None: new memory is allocated."""
        target = self.copy(columns, into)
        sent, at = {}, 0
        for name, column in columns.items():
            num_words = _num_words(column)
            sent[name] = _as_type(target[at : at + num_words], column)
            at += _aligned(num_words)
        return sent

    def copy(self, columns: Mapping[str, Column], into: Tensor | None, padding: Padding | None = None) -> Tensor:
        """Copies columns (named arrays, such as a step's inputs) to the device, and returns the int32 memory that received them,
        one after the other, at its beginning. into: the memory to use; None: new memory is allocated.
        padding: the columns of a step that is padding only; the result has these columns in their order. A column that `columns`
        lacks is taken from the padding. A column that is shorter in `columns` than in the padding ends with the padding's last
        values. None: exactly `columns` are copied."""
        laid_out = _laid_out(columns) if padding is None else padding.under(columns)
        head, pieces = np.frombuffer(laid_out, np.int32), _pieces(columns)
        locked = [group for group in pieces if group.is_locked]
        if locked:
            pieces = pieces[: -len(locked)]
        # of what is copied from a buffer; only with nothing behind it is it padded
        num_words = len(head) + (num_words_in(pieces) if locked else _aligned(num_words_in(pieces)))
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        if self._copied[number] is not None:
            self._copied[number].synchronize()
        if self._parts[number][0] != num_words:
            if len(self._buffers[number]) < num_words:
                self._buffers[number] = self.page_locked(2 * num_words)
            self._parts[number] = num_words, self._buffers[number][:num_words]
        buffer = self._parts[number][1]
        words = buffer.numpy()
        words[: len(head)] = head
        at = len(head)
        for arrays, num, _ in pieces:
            if arrays:
                np.concatenate(arrays, out=words[at : at + num].view(arrays[0].dtype))
                at += num
        end = len(head) + _aligned(num_words - len(head) + num_words_in(locked))
        target = torch.empty(end, dtype=torch.int32, device=self._device) if into is None else into
        (target if target.numel() == num_words else target[:num_words]).copy_(buffer, non_blocking=True)
        at = num_words
        for (source,), num, _ in locked:
            from_there = torch.from_numpy(source) if isinstance(source, np.ndarray) else source
            target[at : at + num].copy_(from_there, non_blocking=True)
            at += num
        if self._pinned:
            if self._copied[number] is None:
                self._copied[number] = torch.cuda.Event(blocking=True)
            self._copied[number].record()
        return target


class Padding:
    """The columns of a step of one size that consists of padding only. The columns of a real step are written over the beginnings
    of these, so a real step may lack a column or have a shorter one. Only a column that is a list of groups (Column) may be longer
    than in the padding."""

    def __init__(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        self._columns = {name: _laid_out({name: column}) for name, column in columns.items()}

    def under(self, columns: Mapping[str, Column]) -> bytes:
        """Returns the bytes of all columns of the padding, one after the other, after the arrays in `columns` (those of a real
        step) were written over their beginnings. A column that is a list of groups is left out."""
        laid_out: list[bytes] = []
        for name, padding in self._columns.items():
            column = columns.get(name)
            if column is None:
                laid_out.append(padding)
            elif isinstance(column, np.ndarray):
                laid_out += (column.tobytes(), padding[column.nbytes :])
        return b"".join(laid_out)


def _laid_out(columns: Mapping[str, Column]) -> bytes:
    """Returns the bytes of the columns one after the other, each aligned to ALIGN_BYTES. A column that is a list of groups is left
    out."""
    laid_out: list[bytes] = []
    for column in columns.values():  # bytes are joined in a fraction of the time that writing arrays to slices of another takes
        if isinstance(column, np.ndarray):
            laid_out += (column.tobytes(), bytes(-column.nbytes % ALIGN_BYTES))
    return b"".join(laid_out)


def _pieces(columns: Mapping[str, Column]) -> list[Group]:
    """Returns the groups of the column that is a list of groups; [] if all columns are arrays."""
    last = list(columns.values())[-1:]
    return [] if not last or isinstance(last[0], np.ndarray) else last[0]


def num_words_in(pieces: list[Group]) -> int:
    return sum(group.num_words for group in pieces)


def words_of(columns: Mapping[str, Column]) -> int:
    """Returns the number of words of 4 bytes that these columns take on the device (Staging.send), alignment included."""
    return sum(_aligned(_num_words(column)) for column in columns.values())


def _num_words(column: Column) -> int:
    if isinstance(column, np.ndarray):
        return column.nbytes // WORD_BYTES
    return num_words_in(column)


def _aligned(num_words: int) -> int:
    """Returns num_words rounded up to a multiple of ALIGN_WORDS: the number of words from the beginning of a column of num_words
    words to that of the next column."""
    return -(-num_words // ALIGN_WORDS) * ALIGN_WORDS


def _as_type(words: Tensor, column: Column) -> Tensor:
    """Returns a column on the device as a tensor of its dtype: float32, float64 or, for all other dtypes, int32. words: the int32
    memory that has received the column."""
    dtype = column.dtype if isinstance(column, np.ndarray) else None
    return words.view(torch.float32) if dtype == np.float32 else words.view(torch.float64) if dtype == np.float64 else words


class DeviceSequences:
    """The state of a model's sequences that stays on the device. last_ids [S + 1] int32: the token that was sampled last for each
    slot. tables: one block table [S + 1, B] int32 for each KV group (the layers that share block tables)."""

    def __init__(self, num_slots: int, max_blocks: int, num_groups: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.last_ids = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.tables = [torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32, device=device) for _ in range(num_groups)]
        self._known = [np.zeros((num_slots, max_blocks), np.int32) for _ in range(num_groups)]

    def update(self, slots: IntArray, num_blocks: int, table: SequenceTable, staging: Staging) -> None:
        """Sends to the device the entries of these slots' block tables that have changed since the last call. Only the first
        num_blocks entries of each slot are compared and sent. table: the sequences on the host."""
        for target, known, own in zip(self.tables, self._known, table.block_tables, strict=True):
            now = own[slots, :num_blocks]
            changed = np.flatnonzero(now != known[slots, :num_blocks])  # much faster than indices in two dimensions
            if len(changed):
                rows, columns = np.divmod(changed, num_blocks)
                values = now[rows, columns]
                places = (slots[rows] * np.int32(target.shape[1]) + columns).astype(np.int32)
                sent = staging.send({"places": places, "values": values})
                entry.set_entries(target, sent["places"], sent["values"])
                known[slots[rows], columns] = values  # only after the launch: if there is no memory, the device lacks them
