"""Counts how many pairs of a token and an expert each expert of a model computes. Every step adds to the counts on the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from loader.shapes.model_shape import ModelShape
from scheduler.batch.plan import LongArray


class ExpertCounts:
    """The counts of one model's experts, or of one device's share of them. The object stays the same through loads and evictions of
    the model, because recorded steps and graphs hold the addresses of its rows.

    A row counts all experts of a layer, since every rank of a split model routes every token; `news` reports only the rank's own
    experts, so that each is reported once. If ranks have copies of each other's experts, a row counts what this rank computes, with
    an entry for each expert that it holds, and `news` reports all experts of the layer. If each expert is divided among several
    ranks, only the first of these has counts. own: the experts that `news` reports."""

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
        """Returns the counts (ExpertMatrices.counts) of a layer, as a view: the same memory each time that the model is built."""
        if layer not in self.layers:
            self.layers.append(layer)
        row = self._table[self.layers.index(layer)]
        return row if self._held is None else row[: len(self._held(layer))]

    def news(self, wait: bool) -> LongArray | None:
        """Returns how many pairs each expert of `own` [len(layers), len(own)] has computed since the last call that returned an
        array. Returns None if there are none, or if the device's counts have not arrived yet, which happens only if `wait` is
        False."""
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
        """Returns a copy of the table as it is now, or as it was at an earlier call. Returns None if the device's counts have not
        arrived yet and `wait` is False."""
        copied: LongArray = self._table.numpy().copy()
        return copied


def has_counts(shape: ModelShape) -> bool:
    """Returns whether a model, or a device's share of it, counts what its experts compute."""
    return shape.experts is not None and (shape.split is None or shape.split.rank % shape.split.division.inner_parts == 0)
