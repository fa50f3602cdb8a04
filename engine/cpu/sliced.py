"""Computes a step of more tokens than the work space allows: layer by layer, and each layer slice by slice of the tokens. This
allows prompts of any length to be computed while the weights are still being loaded (engine/lifecycle/first_step.py).

Shapes: T tokens of the whole step, W width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.cpu.batch import HostBatch
from scheduler.batch.plan import BatchPlan

Layer = Callable[[Tensor | None, Tensor, HostBatch], Tensor | None]


def slices(plan: BatchPlan, max_tokens: int) -> list[BatchPlan]:
    """Cuts a plan into slices of at most max_tokens tokens, and returns them as plans, in order. Their rows sample nothing. All
    slices but the last have the same number of tokens, which is a multiple of 32 if max_tokens allows it, else of 8 if possible;
    such slices need no padding."""
    step = next((step for step in (32, 8) if max_tokens >= step), 1)
    size = max_tokens // step * step
    ends = np.cumsum(plan.num_new)
    parts = []
    for begin in range(0, int(ends[-1]), size):
        first = np.maximum(plan.num_new - (ends - begin), 0)  # how many of each row's tokens are in earlier slices
        num_new = np.minimum(plan.num_new, size - (ends - plan.num_new) + begin) - first
        here = num_new > 0
        rows = (plan.num_computed + first)[here].astype(np.int32), num_new[here].astype(np.int32)
        parts.append(BatchPlan(plan.step_id, plan.model, plan.slots[here], *rows, np.zeros(len(rows[0]), np.bool_)))
    return parts


def in_slices(layers: Iterable[Layer], parts: Sequence[HostBatch]) -> Iterator[Layer]:
    """Yields, for each of a model's layers, a layer that computes a whole step slice by slice. parts: the inputs of the slices;
    their tokens, one slice after the other, are those of the step."""
    for layer in layers:
        yield _Sliced(layer, parts)


class _Sliced:
    """A layer that computes a step slice by slice. layer: computes one slice. parts: the inputs of the slices, in order."""

    def __init__(self, layer: Layer, parts: Sequence[HostBatch]) -> None:
        self._layer, self._parts = layer, parts

    def __call__(self, update: Tensor | None, residual: Tensor, batch: HostBatch) -> Tensor | None:
        """Computes the layer for all T tokens of a step, and returns the layer's update [T, W], which the next layer adds to the
        residual; None: there is nothing to add. update [T, W]: the previous layer's update, in whose memory the new update is
        written; None: there is nothing to add. residual [T, W]: changed in place by the layer."""
        out: Tensor | None = None
        begin = 0
        for part in self._parts:
            rows = slice(begin, begin + len(part.input_ids))
            if (inputs := batch.layer_inputs) is not None:
                part.layer_inputs = inputs.view(len(residual), -1)[rows].view(-1, inputs.shape[1])
            made = self._layer(None if update is None else update[rows], residual[rows], part)
            if made is not None:
                if out is None:
                    out = torch.zeros_like(residual) if update is None else update
                out[rows] = made
            begin += part.num_tokens
        return out
