"""The norms around a decoder's branches: RMS norms, or LayerNorm with or without biases."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.layers.weights import Weights
from engine.ops.ops import Ops
from loader.architectures.decoder import Decoder
from loader.model_shape import ModelShape


class Norm:
    """A norm over the width of rows [T, hidden]. name: name of its tensors in the checkpoint. `of_sum` scales what a branch adds to
    the residual by ModelShape.branch_scale."""

    def __init__(self, ops: Ops[Any], family: Decoder, shape: ModelShape, weights: Weights, name: str) -> None:
        self.ops, self.is_layer_norm = ops, family.has_layer_norms
        self.weight, self.bias = weights.get(f"{name}.weight"), weights.find(f"{name}.bias")
        self.eps, self.around_one, self.scale = shape.rms_norm_eps, family.norms_around_one, shape.branch_scale

    @classmethod
    def named(cls, ops: Ops[Any], family: Decoder, shape: ModelShape, weights: Weights, prefix: str, name: str) -> Norm | None:
        """Returns a layer's norm, or None if the family has no such norm, that is, if the name is ""."""
        return cls(ops, family, shape, weights, prefix + name) if name else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_layer_norm:
            return self.ops.layer_norm(x, self.weight, self.bias, self.eps)
        return self.ops.rms_norm(x, self.weight, self.eps, self.around_one)

    def of_sum(self, update: Tensor, residual: Tensor) -> Tensor:
        """Adds the update, scaled, to the residual in place; returns the norm of the sum."""
        if self.is_layer_norm:
            return self.ops.add_layer_norm(update, residual, self.weight, self.bias, self.eps, self.scale)
        return self.ops.add_rms_norm(update, residual, self.weight, self.eps, self.around_one, self.scale)
