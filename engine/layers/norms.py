"""Computes the norms before and after attention and MLP in a decoder: RMS norms, or LayerNorm with or without biases. Shapes: T
tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.layers.weights import Weights
from engine.ops.ops import Ops
from loader.architectures.decoder import Decoder
from loader.shapes.model_shape import ModelShape


class Norm:
    """A norm of each row of [T, hidden]: an RMS norm or LayerNorm, whichever the family has. name: name of its tensors in the
    checkpoint. A call returns the norm of its argument; `of_sum` adds an update to the residual, and returns the norm of the
    sum."""

    def __init__(self, ops: Ops[Any], family: Decoder, shape: ModelShape, weights: Weights, name: str) -> None:
        self.ops, self.is_layer_norm = ops, family.has_layer_norms
        self.weight, self.bias = weights.get(f"{name}.weight"), weights.find(f"{name}.bias")
        self.eps, self.around_one, self.scale = shape.rms_norm_eps, family.norms_around_one, shape.branch_scale

    @classmethod
    def named(cls, ops: Ops[Any], family: Decoder, shape: ModelShape, weights: Weights, prefix: str, name: str) -> Norm | None:
        """Returns the norm of a layer whose tensors have the name prefix + name. Returns None if name is "", which means that the
        family has no such norm."""
        return cls(ops, family, shape, weights, prefix + name) if name else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_layer_norm:
            return self.ops.layer_norm(x, self.weight, self.bias, self.eps)
        return self.ops.rms_norm(x, self.weight, self.eps, self.around_one)

    def of_sum(self, update: Tensor, residual: Tensor) -> Tensor:
        """Adds update [T, hidden], times ModelShape.branch_scale, to residual [T, hidden] in place, and returns the norm of the sum
        [T, hidden]."""
        if self.is_layer_norm:
            return self.ops.add_layer_norm(update, residual, self.weight, self.bias, self.eps, self.scale)
        return self.ops.add_rms_norm(update, residual, self.weight, self.eps, self.around_one, self.scale)
