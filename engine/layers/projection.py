"""Computes a matrix multiplication with weights of the model, and adds the bias and what the LoRA adapters of the tokens contribute
(https://arxiv.org/abs/2106.09685). Shapes: T tokens, K inputs, N outputs."""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from engine.layers.weights import Weights
from engine.ops.ops import BatchT, Ops


class Projection(Generic[BatchT]):
    """A linear layer whose result LoRA adapters may change: x [T, K] -> [T, N]. names: names of its matrices in the checkpoint,
    without the prefix; several matrices are fused into one. weight [N, K]: the fused matrix. bias: [N]; None: there is none."""

    def __init__(self, ops: Ops[BatchT], weights: Weights, prefix: str, names: tuple[str, ...]) -> None:
        self.ops = ops
        self.weight = weights.matrix(prefix, names)
        self.bias = weights.find_fused(prefix, names, ".bias")
        self.adapted = weights.adapted(prefix, names)

    def __call__(self, x: Tensor, batch: BatchT) -> Tensor:
        out = self.ops.linear(x, self.weight, self.bias)
        if batch.adapters is not None and self.adapted is not None:
            self.ops.add_adapters(x, out, self.adapted, batch)
        return out
