"""Keeps the tables of a model's LoRA adapters on a GPU: the place of each adapter's matrices in the KV arena, and the adapter of
each slot's sequence.

Shapes: M matrix products that adapters may change, A adapters, S slots (places of running sequences), R rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cuda.batch import DeviceAdapters
from engine.cuda.kernels import entry
from engine.cuda.sequences import Column, Staging, words_of
from engine.loading.adapter_tables import AdapterTables
from engine.memory.out_of_memory import lacks_memory
from loader.adapters.layout import AdapterLayout
from loader.shapes.model_shape import ModelShape
from scheduler.batch.plan import IntArray, SequenceTable


class _OnDevice(NamedTuple):
    """The memory on the device that kernels of adapters read.

    places [M, A] int64: for each matrix product and adapter, the index in `memory` at which the adapter's matrices for this product
    begin; -1: there are none.
    ranks [M, A] int32: the LoRA rank of these matrices.
    of_slots [S + 1] int32: the number of each slot's adapter; -1: none. Slot S, at which padding rows point, has none.
    memory: the KV arena as a flat tensor in the model's dtype.
    sent, int32: receives the new table entries of one adapter before a kernel writes them to the tables."""

    places: Tensor
    ranks: Tensor
    of_slots: Tensor
    memory: Tensor
    sent: Tensor


class DeviceAdapterMemory(AdapterTables):
    """The tables of one model's LoRA adapters on a GPU (an AdapterMemory of engine.contracts.adapters). The device's tables are
    allocated with the model and never move, because graphs read them. Their content is changed on the stream of steps, so only
    steps launched afterwards see a change.

    bound: an upper bound of the ranks of all adapters so far, one of the kernels' RANK_BOUNDS; 0 before the first adapter.
    dtype: the model's. arena: the device's KV memory as uint8.
    prepare: compiles the kernels of adapters. bound_grew: called when `bound` has grown; graphs of steps with adapters are then
    invalid, because their grids depend on it."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: str,
        arena: Tensor,
        num_slots: int,
        staging: Staging,
        prepare: Callable[[], None],
        bound_grew: Callable[[], None],
    ) -> None:
        super().__init__(shape, dtype)
        self.bound = 0
        self._staging = staging
        self._prepare, self._bound_grew = prepare, bound_grew
        self._of_slots = np.full(num_slots, -1, np.int32)  # the device's copy of of_slots
        numbers: torch.dtype = getattr(torch, dtype)
        self._held = _OnDevice(
            torch.full(self.places.shape, -1, dtype=torch.int64, device=arena.device),
            torch.zeros(self.places.shape, dtype=torch.int32, device=arena.device),
            torch.full((num_slots + 1,), -1, dtype=torch.int32, device=arena.device),
            arena[: len(arena) // numbers.itemsize * numbers.itemsize].view(numbers),
            torch.empty(words_of(self._entries(0)), dtype=torch.int32, device=arena.device),
        )

    # ---- adapters that come and go

    def prepare(self) -> None:
        self._prepare()

    def set(self, number: int, first_byte: int, layout: AdapterLayout) -> None:
        self.fill(number, first_byte, layout)
        self._send(number)
        bound = entry.rank_bound(int(self.ranks[:, number].max(initial=0)))
        if bound > self.bound:
            self.bound = bound
            self._bound_grew()

    def clear(self, number: int) -> None:
        """Removes the adapter with this number from the tables. Steps that were launched before still use the adapter. If memory is
        lacking, the device keeps the entries, which no slot refers to before `set` replaces them."""
        self.empty(number)
        try:
            self._send(number)
        except Exception as error:
            if not lacks_memory(error):
                raise

    def clear_all(self) -> None:
        """Removes all adapters from the tables."""
        for number in np.flatnonzero((self.places >= 0).any(axis=0)).tolist():
            self.clear(number)

    def _send(self, number: int) -> None:
        """Copies the host's table entries of adapter `number` to the device's tables."""
        sent, held = self._staging.send(self._entries(number), self._held.sent), self._held
        entry.set_entries(held.places.view(torch.int32), sent["words"], sent["places"])
        entry.set_entries(held.ranks, sent["at"], sent["ranks"])

    def _entries(self, number: int) -> dict[str, Column]:
        """Returns the table entries of adapter `number` as the columns (arrays) that are sent to the device. The entries are
        `places` [2 M] int32 (the int64 numbers as pairs of words) and `ranks` [M]. The indices in the flattened tables to which
        they belong are `words` [2 M] for the words of `places`, and `at` [M] for `ranks`."""
        num_products, width = self.places.shape
        at = np.arange(num_products, dtype=np.int32) * np.int32(width) + np.int32(number)
        columns: dict[str, Column] = {"words": np.stack((2 * at, 2 * at + 1), axis=1).reshape(-1), "at": at}
        return columns | {"places": self.places[:, number].copy().view(np.int32), "ranks": self.ranks[:, number].copy()}

    # ---- adapters of a step

    def update(self, slots: IntArray, table: SequenceTable) -> bool:
        """Copies the adapter numbers of the step's slots to the device, as far as they have changed since the last call. Returns
        whether any of these slots has an adapter. table: the sequences on the host, with the adapter number of each slot."""
        if not self.bound:
            return False
        now = table.adapter[slots]
        changed = np.flatnonzero(now != self._of_slots[slots])
        if len(changed):
            places, values = slots[changed], now[changed]
            sent = self._staging.send({"places": places, "values": values})
            entry.set_entries(self._held.of_slots, sent["places"], sent["values"])
            self._of_slots[places] = values  # only after the launch: if there is no memory, the device lacks them
        return bool((now >= 0).any())

    def of_tokens(self, slots: Tensor, token_rows: Tensor) -> DeviceAdapters:
        """Returns the adapter of each token of a step, together with the tables, on the device. slots [R]: the slot of each row.
        token_rows [T]: the row of each token."""
        held = self._held
        numbers = entry.adapter_numbers(held.of_slots, slots, token_rows)
        return DeviceAdapters(numbers, held.places, held.ranks, held.memory, self.bound or entry.SMALLEST_RANK_BOUND)

    @property
    def kept_bytes(self) -> int:
        """Returns the number of bytes that the tables take on the device."""
        held = self._held
        return sum(table.nbytes for table in (held.places, held.ranks, held.of_slots, held.sent))
