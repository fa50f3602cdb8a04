"""Computes a layer of the gated delta rule (linear attention, https://arxiv.org/abs/2412.06464), which keeps all earlier tokens of
a sequence in a state of fixed size. Shapes: T tokens.
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from engine.layers.projection import Projection
from engine.layers.weights import Weights
from engine.ops.ops import BatchT, DeltaColumns, DeltaRule, Ops
from loader.architectures.decoder import Decoder
from loader.shapes.model_shape import DeltaShape, ModelShape


class GatedDelta(Generic[BatchT]):
    """The gated delta rule of one layer, computed in place of attention: x [T, hidden] -> [T, hidden]. It reads the states of the
    batch's sequences, and replaces them by the states after the batch's tokens."""

    def __init__(self, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights, layer: int) -> None:
        assert family.deltas is not None
        assert shape.delta is not None
        self.ops, self.layer = ops, layer
        names, delta, prefix = family.deltas.names, shape.delta, family.names.layer.format(layer)
        self.inputs = Projection(ops, weights, prefix, names.inputs)
        self.gate_weight = weights.matrix(prefix, names.gates)
        self.output = Projection(ops, weights, prefix, (names.output,))
        self.rule = DeltaRule(
            convolution=weights.get(f"{prefix}{names.convolution}.weight").squeeze(1),
            decay=weights.get(prefix + names.decay),
            step_bias=weights.get(prefix + names.step_bias),
            norm=weights.get(f"{prefix}{names.norm}.weight"),
            eps=shape.rms_norm_eps,
            num_key_heads=delta.num_key_heads,
            num_value_heads=delta.num_value_heads,
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
            columns=columns_of(delta),
        )

    def __call__(self, x: Tensor, batch: BatchT) -> Tensor:
        ops = self.ops
        made, gates = self.inputs(x, batch), ops.linear(x, self.gate_weight)
        return self.output(ops.gated_delta(made, gates, self.rule, self.layer, batch), batch)


def columns_of(delta: DeltaShape) -> DeltaColumns:
    """Returns the columns at which the values of each head begin in the outputs of a gated delta layer's projections. With
    delta.by_head, the queries, keys, values and gates of one key head are adjacent; otherwise all queries come first, then all
    keys, all values and all gates."""
    keys, values = delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim
    served = delta.num_value_heads // delta.num_key_heads
    if not delta.by_head:
        places = (0, keys, delta.key_dim, 2 * keys, 2 * keys + values, served * delta.value_dim)
        return DeltaColumns(*places, 0, delta.num_value_heads, served)
    own = served * delta.value_dim
    stride = 2 * (delta.key_dim + own)
    return DeltaColumns(0, delta.key_dim, stride, 2 * delta.key_dim, 2 * delta.key_dim + own, stride, 0, served, 2 * served)
