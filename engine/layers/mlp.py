"""The gated feed-forward layer (SwiGLU)."""

from __future__ import annotations

from torch import Tensor

from engine import ops
from engine.layers.weights import Weights


class GatedMLP:
    """x [T, hidden] -> [T, hidden]."""

    def __init__(self, weights: Weights, layer: int) -> None:
        prefix = f"model.layers.{layer}.mlp."
        names = ("gate_proj", "up_proj")
        gate_up_weight = weights.fused(prefix, names, ".weight")
        assert gate_up_weight is not None
        self.gate_up_weight = gate_up_weight
        self.gate_up_bias = weights.fused(prefix, names, ".bias")
        self.down_weight = weights.get(prefix + "down_proj.weight")
        self.down_bias = weights.find(prefix + "down_proj.bias")

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(ops.silu_and_mul(ops.linear(x, self.gate_up_weight, self.gate_up_bias)), self.down_weight, self.down_bias)
