"""The gated feed-forward layer: SwiGLU, or GELU in SiLU's place."""

from __future__ import annotations

from torch import Tensor

from engine import ops
from engine.layers.weights import Weights
from loader.architectures.decoder import GELU_TANH, SILU, Decoder

# [T, 2 W] -> [T, W]: gate applied to up
_ACTIVATIONS = {SILU: ops.silu_and_mul, GELU_TANH: ops.gelu_and_mul}


class GatedMLP:
    """x [T, hidden] -> [T, hidden]."""

    def __init__(self, family: Decoder, weights: Weights, layer: int) -> None:
        names, prefix = family.names, family.names.layer.format(layer)
        self.gate_up_weight = weights.matrix(prefix, names.gate_up)
        self.gate_up_bias = weights.find_fused(prefix, names.gate_up, ".bias")
        self.down_weight = weights.matrix(prefix, (names.down,))
        self.down_bias = weights.find(f"{prefix}{names.down}.bias")
        self.activate = _ACTIVATIONS[family.activation]

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(self.activate(ops.linear(x, self.gate_up_weight, self.gate_up_bias)), self.down_weight, self.down_bias)
