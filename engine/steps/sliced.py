"""A step of more tokens than the work space has room for: layer by layer, and each layer slice by slice. So prompts of any length
run behind weights that are still coming (engine/steps/first.py).

Shapes: T tokens of the whole step, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.contracts import BatchPlan
from engine.steps.forward_batch import ForwardBatch, HostBatch

Layer = Callable[[Tensor | None, Tensor, ForwardBatch], Tensor]


def slices(plan: BatchPlan, max_tokens: int) -> list[BatchPlan]:
    """Parts of the plan in its order, that sample nothing; all but the last of the same number of tokens, max_tokens at most and a
    multiple of 32 where it is that much: then no padding is needed between them."""
    step = next((step for step in (32, 8) if max_tokens >= step), 1)
    size = max_tokens // step * step
    ends = np.cumsum(plan.num_new)
    parts = []
    for begin in range(0, int(ends[-1]), size):
        first = np.maximum(plan.num_new - (ends - begin), 0)  # of each row's tokens, those in earlier slices
        num_new = np.minimum(plan.num_new, size - (ends - plan.num_new) + begin) - first
        here = num_new > 0
        rows = (plan.num_computed + first)[here].astype(np.int32), num_new[here].astype(np.int32)
        parts.append(BatchPlan(plan.step_id, plan.model, plan.slots[here], *rows, np.zeros(len(rows[0]), np.bool_)))
    return parts


def in_slices(layers: Iterable[Layer], parts: Sequence[HostBatch]) -> Iterator[Layer]:
    """Each layer as one that computes a whole step, whose tokens are those of `parts` end to end."""
    for layer in layers:
        yield _Sliced(layer, parts)


class _Sliced:
    def __init__(self, layer: Layer, parts: Sequence[HostBatch]) -> None:
        self._layer, self._parts = layer, parts

    def __call__(self, update: Tensor | None, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """As the layer. The update is given back where it was: a slice is read before it is written. [T, W] each."""
        out = torch.zeros_like(residual) if update is None else update
        begin = 0
        for part in self._parts:
            rows = slice(begin, begin + len(part.input_ids))
            out[rows] = self._layer(None if update is None else update[rows], residual[rows], part)
            begin += part.num_tokens
        return out
