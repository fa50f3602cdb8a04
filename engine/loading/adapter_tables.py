"""Keeps tables of one model's LoRA adapters on the host: where each adapter lies in the KV arena, and its ranks."""

from __future__ import annotations

import numpy as np

from engine.contracts.adapters import ReadAdapter
from engine.loading.adapter_files import read_adapter
from engine.protocol import AdapterSource
from loader.adapters.layout import AdapterLayout
from loader.configs.adapter_matrices import adapted_matrices
from loader.shapes.dtypes import ITEM_BYTES
from loader.shapes.model_shape import ModelShape
from scheduler.batch.adapters import MAX_ADAPTERS


class AdapterTables:
    """Host tables of where the LoRA adapters of one model lie: the part of AdapterMemory (engine.contracts.adapters) that does not
    depend on the device. There is a row for each of the M matrices of the model that adapters may change, and a column for each of
    the A = MAX_ADAPTERS adapter numbers.
    places [M, A] int64: where in the KV arena, in elements of `dtype`, the LoRA matrices begin by which the adapter changes the
    model's matrix; -1: it does not change that matrix.
    ranks [M, A] int32: the rank of these LoRA matrices; 0: there are none.
    dtype: the model's dtype."""

    def __init__(self, shape: ModelShape, dtype: str) -> None:
        self._shape, self._dtype = shape, dtype
        size = (len(adapted_matrices(shape)), MAX_ADAPTERS)
        self.places, self.ranks = np.full(size, -1, np.int64), np.zeros(size, np.int32)

    def read(self, source: AdapterSource) -> ReadAdapter:
        return read_adapter(source, self._shape, self._dtype)

    def fill(self, number: int, first_byte: int, layout: AdapterLayout) -> None:
        """Writes column `number` of `places` and `ranks` for an adapter. first_byte: the offset in the KV arena, in bytes, at which
        the adapter's matrices begin. layout: which matrices it has, and their offsets from first_byte. Raises ValueError if
        first_byte is no multiple of the dtype's size, IndexError if there is no such column."""
        first, rest = divmod(first_byte, ITEM_BYTES[self._dtype])
        if rest:
            raise ValueError(f"adapter {number} begins at byte {first_byte}, which is within a number of {self._dtype}")
        self.empty(number)
        for place in layout.places:
            self.places[place.number, number], self.ranks[place.number, number] = first + place.offset, place.rank

    def empty(self, number: int) -> None:
        """Clears column `number` of `places` and `ranks`: no adapter has this number any more. Raises IndexError if there is no
        such column."""
        if not 0 <= number < MAX_ADAPTERS:
            raise IndexError(f"adapter number {number} is not among 0 to {MAX_ADAPTERS - 1}")
        self.places[:, number], self.ranks[:, number] = -1, 0
