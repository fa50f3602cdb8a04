"""A model's LoRA adapters in the memory of the `cpu` device: where each lies in the KV arena."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

import numpy as np

from engine.contracts.adapters import ReadAdapter
from engine.loading.adapter_files import read_adapter
from engine.protocol import AdapterSource
from loader.adapters.layout import AdapterLayout
from loader.adapters.matrices import adapted_matrices
from loader.dtypes import ITEM_BYTES
from loader.model_shape import ModelShape
from scheduler.batch.adapters import MAX_ADAPTERS


class HostAdapterMemory:
    """An engine.contracts.adapters.AdapterMemory. Its tables, places [M, S] int64 and ranks [M, S] int32, are as in BatchAdapters,
    with S = MAX_ADAPTERS. They stay where they are, since recorded steps read them. dtype: the model's. added: a method of the
    model, called after an adapter was set."""

    def __init__(self, shape: ModelShape, dtype: str, added: Callable[[], None]) -> None:
        # the model refers to this: a cycle would leave an evicted model to the garbage collector
        self._shape, self._dtype, self._added = shape, dtype, WeakMethod(added)
        size = (len(adapted_matrices(shape)), MAX_ADAPTERS)
        self.places, self.ranks = np.full(size, -1, np.int64), np.zeros(size, np.int32)

    def prepare(self) -> None:
        """Does nothing: steps can do without compiled kernels."""

    def read(self, source: AdapterSource) -> ReadAdapter:
        return read_adapter(source, self._shape, self._dtype)

    def set(self, number: int, first_byte: int, layout: AdapterLayout) -> None:
        first, rest = divmod(first_byte, ITEM_BYTES[self._dtype])
        if rest:
            raise ValueError(f"adapter {number} begins at byte {first_byte}, which is within a number of {self._dtype}")
        self.clear(number)
        for place in layout.places:
            self.places[place.number, number], self.ranks[place.number, number] = first + place.offset, place.rank
        if (added := self._added()) is not None:
            added()

    def clear(self, number: int) -> None:
        if not 0 <= number < MAX_ADAPTERS:
            raise IndexError(f"adapter number {number} is not among 0 to {MAX_ADAPTERS - 1}")
        self.places[:, number], self.ranks[:, number] = -1, 0

    def clear_all(self) -> None:
        """Forgets every adapter."""
        self.places[:], self.ranks[:] = -1, 0
