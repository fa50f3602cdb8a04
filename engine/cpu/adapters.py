"""Keeps, for a model on the `cpu` device, the tables that say where in memory the matrices of its LoRA adapters lie."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

from engine.loading.adapter_tables import AdapterTables
from loader.adapters.layout import AdapterLayout
from loader.shapes.model_shape import ModelShape


class HostAdapterMemory(AdapterTables):
    """Implements engine.contracts.adapters.AdapterMemory for a model on the `cpu` device: the tables that say where in memory the
    matrices of the model's LoRA adapters lie. The tables are never moved, because recorded steps hold their addresses.
    dtype: the model's dtype.
    added: a method of the model, called after each `set`, which enters an adapter into the tables."""

    def __init__(self, shape: ModelShape, dtype: str, added: Callable[[], None]) -> None:
        super().__init__(shape, dtype)
        self._added = WeakMethod(added)  # weak, to make no reference cycle with the model

    def prepare(self) -> None:
        """Does nothing: on the `cpu` device steps can compute adapters at any time, because they do not need compiled kernels for
        that."""

    def set(self, number: int, first_byte: int, layout: AdapterLayout) -> None:
        self.fill(number, first_byte, layout)
        if (added := self._added()) is not None:
            added()

    def clear(self, number: int) -> None:
        self.empty(number)

    def clear_all(self) -> None:
        """Removes all adapters from the tables."""
        self.places[:], self.ranks[:] = -1, 0
