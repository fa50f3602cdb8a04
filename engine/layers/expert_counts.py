"""Counts how many tokens pass through each expert of a model. The counts are in a table on the device, to which every step adds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from loader.shapes.model_shape import ModelShape
from scheduler.batch.plan import LongArray


class ExpertCounts:
    """The table that counts how many tokens pass through each expert of one model, or of the part of the model on one device. There
    is one object for a model, which is kept when the model is evicted and loaded again, because recorded steps and CUDA graphs hold
    the addresses of the table's rows.

    own: the experts that `news` reports. In a split model, three cases differ:

    Each expert is on one rank (device). A row counts all experts of a layer, because every rank routes every token. `news` reports
    only the rank's own experts, so that each expert is reported by one rank.

    Ranks have copies of each other's experts. A row counts only the tokens that this rank computes, with an entry for each expert
    that the rank holds. `news` reports all experts of the layer.

    Each expert is divided among several ranks. Only the first of these ranks has counts."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        assert shape.experts is not None
        self.own, self.num_experts = shape.experts.own, shape.experts.num_experts
        self._held: Callable[[int], tuple[int, ...]] | None = None  # for copies: returns the experts of a layer's row, in order
        if shape.split is not None and shape.split.copies:
            self.own, self._held = range(self.num_experts), shape.experts_of
        self.layers: list[int] = []  # layers with experts that are computed here, in the order of the rows
        self._table = torch.zeros(shape.num_computed_layers, self.num_experts, dtype=torch.int64, device=device)
        self._told: LongArray | None = None  # what `news` has reported so far

    def row(self, layer: int) -> Tensor:
        """Returns the counts of a layer's experts (ExpertMatrices.counts) as a view of the table. For the same layer it is always
        the same memory, also when the model is loaded again."""
        if layer not in self.layers:
            self.layers.append(layer)
        row = self._table[self.layers.index(layer)]
        return row if self._held is None else row[: len(self._held(layer))]

    def news(self, wait: bool) -> LongArray | None:
        """Returns how many tokens have passed through each expert of `own`, [len(layers), len(own)], since the last call that
        returned an array; None if no token has passed since then. wait: whether to wait for the device's counts; if False, the
        result is also None if they have not arrived yet."""
        found = self._on_host(wait)
        if found is None:
            return None
        told = found[: len(self.layers), self.own.start : self.own.stop]
        if self._held is not None:
            told = np.zeros_like(told)
            for number, layer in enumerate(self.layers):
                held = list(self._held(layer))
                told[number, held] = found[number, : len(held)]
        new, self._told = told if self._told is None else told - self._told, told
        return new if new.any() else None

    def _on_host(self, wait: bool) -> LongArray | None:
        """Returns a copy of the table on the host, as the table is now, or on a GPU possibly as it was when an earlier call began
        to copy it. wait: whether to wait for the device's counts; if False, returns None if they have not arrived yet."""
        copied: LongArray = self._table.numpy().copy()
        return copied


def has_counts(shape: ModelShape) -> bool:
    """Returns whether a model, or a device's share of it, has counts of the tokens that pass through each of its experts."""
    return shape.experts is not None and (shape.split is None or shape.split.rank % shape.split.division.inner_parts == 0)
