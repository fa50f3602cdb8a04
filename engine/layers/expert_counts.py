"""Counts how many tokens pass through each expert of a model, in a table on the device to which every step adds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from loader.shapes.model_shape import ModelShape
from scheduler.batch.plan import LongArray


class ExpertCounts:
    """The table that counts how many tokens pass through each expert of one model, or of the part of it on one device. The object
    stays the same through loads and evictions of the model, because recorded steps and CUDA graphs hold the addresses of the
    table's rows.

    own: the experts that `news` reports. What a row of the table counts depends on how a model is split:

    Without copies of experts, a row counts all experts of a layer, because every rank (device) routes every token; `news` reports
    only the rank's own experts, so that each is reported once.

    If ranks have copies of each other's experts, a row counts only what this rank computes, with an entry for each expert that it
    holds; `news` reports all experts of the layer.

    If each expert is divided among several ranks, only the first of these has counts."""

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
        """Returns the counts of a layer's experts (ExpertMatrices.counts) as a view of the table: the same memory each time the
        model is built."""
        if layer not in self.layers:
            self.layers.append(layer)
        row = self._table[self.layers.index(layer)]
        return row if self._held is None else row[: len(self._held(layer))]

    def news(self, wait: bool) -> LongArray | None:
        """Returns how many tokens have passed through each expert of `own` since the last call that returned an array,
        [len(layers), len(own)]; None if there were none. Unless `wait` is set, it returns None also if the device's counts have not
        arrived yet."""
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
        """Returns a copy of the table on the host, as it is now or as it was at an earlier call. Returns None if `wait` is not set
        and the device's counts have not arrived yet."""
        copied: LongArray = self._table.numpy().copy()
        return copied


def has_counts(shape: ModelShape) -> bool:
    """Returns whether a model, or a device's share of it, counts how many tokens pass through each of its experts."""
    return shape.experts is not None and (shape.split is None or shape.split.rank % shape.split.division.inner_parts == 0)
