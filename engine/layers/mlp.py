"""Computes the feed-forward layer: gated, with SiLU (SwiGLU) or GELU as its activation, or without a gate and with GELU. Shapes: T
tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.layers.projection import Projection
from engine.layers.weights import Weights
from engine.ops.ops import Ops, StepBatch
from loader.architectures.decoder import GELU_NEW, GELU_TANH, SILU, Decoder
from loader.shapes.model_shape import ModelShape


class MLP:
    """A feed-forward network: x [T, hidden] -> [T, hidden]. gate_up, down: names of its matrices in the checkpoint, without the
    prefix. The activation decides whether there is a gate; without a gate, the activation is applied to the whole output of
    gate_up."""

    def __init__(
        self, ops: Ops[Any], weights: Weights, prefix: str, gate_up: tuple[str, ...], down: str, activation: str = SILU
    ) -> None:
        self.ops = ops
        self.gate_up = Projection(ops, weights, prefix, gate_up)
        self.down = Projection(ops, weights, prefix, (down,))
        # [T, 2 W] -> [T, W]; without a gate [T, W] -> [T, W]
        self.activate = {SILU: ops.silu_and_mul, GELU_TANH: ops.gelu_and_mul, GELU_NEW: ops.gelu}[activation]
        self.gelu = None if activation == GELU_NEW else activation == GELU_TANH  # of the gate; None: there is no gate

    @classmethod
    def of_layer(cls, ops: Ops[Any], family: Decoder, shape: ModelShape, weights: Weights, layer: int) -> MLP:
        """Returns the MLP of a layer. It must be a layer with an MLP, not one with experts in its place."""
        names = family.names
        return cls(ops, weights, names.layer.format(layer), names.gate_up, names.down, family.activation)

    def __call__(self, x: Tensor, batch: StepBatch) -> Tensor:
        return self.down(self._inner(x, batch), batch)

    def _inner(self, x: Tensor, batch: StepBatch) -> Tensor:
        """Returns the activations [T, W]. The product and its activation are one operation, unless LoRA adapters change the
        product or there is no gate."""
        made = self.gate_up
        if self.gelu is None or (batch.adapters is not None and made.adapted is not None):
            return self.activate(made(x, batch))
        return self.ops.gated_linear(x, made.weight, made.bias, self.gelu)
