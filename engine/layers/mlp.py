"""The gated feed-forward layer, with SiLU (SwiGLU) or GELU as its activation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.layers.weights import Weights
from engine.ops.ops import Ops
from loader.architectures.decoder import GELU_TANH, SILU, Decoder


class GatedMLP:
    """The feed-forward part of one layer: x [T, hidden] -> [T, hidden]."""

    def __init__(self, ops: Ops[Any], family: Decoder, weights: Weights, layer: int) -> None:
        names, prefix = family.names, family.names.layer.format(layer)
        self.gate_up_weight = weights.matrix(prefix, names.gate_up)
        self.gate_up_bias = weights.find_fused(prefix, names.gate_up, ".bias")
        self.down_weight = weights.matrix(prefix, (names.down,))
        self.down_bias = weights.find(f"{prefix}{names.down}.bias")
        self.linear = ops.linear
        self.activate = {SILU: ops.silu_and_mul, GELU_TANH: ops.gelu_and_mul}[family.activation]  # [T, 2 W] -> [T, W]

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = self.linear(x, self.gate_up_weight, self.gate_up_bias)
        return self.linear(self.activate(gate_up), self.down_weight, self.down_bias)
