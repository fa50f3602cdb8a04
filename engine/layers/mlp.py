"""The gated feed-forward layer: SwiGLU, or with GELU in SiLU's place."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine import ops
from engine.layers.weights import Weights


class GatedMLP:
    """x [T, hidden] -> [T, hidden].

    projections: names of those that give gate and up. activate: [T, 2 W] -> [T, W], gate applied to up.
    """

    def __init__(
        self,
        weights: Weights,
        layer: int,
        projections: tuple[str, ...] = ("gate_proj", "up_proj"),
        activate: Callable[[Tensor], Tensor] = ops.silu_and_mul,
    ) -> None:
        prefix = f"model.layers.{layer}.mlp."
        self.gate_up_weight = weights.matrix(prefix, projections)
        self.gate_up_bias = weights.find_fused(prefix, projections, ".bias")
        self.down_weight = weights.matrix(prefix, ("down_proj",))
        self.down_bias = weights.find(prefix + "down_proj.bias")
        self.activate = activate

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(self.activate(ops.linear(x, self.gate_up_weight, self.gate_up_bias)), self.down_weight, self.down_bias)
