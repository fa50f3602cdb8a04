"""A mixture of experts: the feed-forward part of a layer, in which each token passes through a few of many small networks."""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from engine.layers.mlp import GatedMLP
from engine.layers.weights import Weights
from engine.ops.ops import BatchT, ExpertMatrices, Ops
from loader.architectures.decoder import Decoder
from loader.model_shape import ModelShape


class MixtureOfExperts(Generic[BatchT]):
    """The feed-forward part of one layer: x [T, hidden] -> [T, hidden]. router [E, hidden], or [E + 1, hidden] where the gate of an
    expert for all tokens (shared) lies behind the router's matrix, so that one product gives the scores and the gate."""

    def __init__(self, ops: Ops[BatchT], router: Tensor, experts: ExpertMatrices, shared: GatedMLP | None) -> None:
        self.ops, self.router, self.experts, self.shared = ops, router, experts, shared

    @classmethod
    def of_layer(
        cls, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights, layer: int
    ) -> MixtureOfExperts[BatchT]:
        assert family.experts is not None
        assert shape.experts is not None
        names, sizes, prefix = family.experts.names, shape.experts, family.names.layer.format(layer)
        router = weights.fused(prefix, names.router_and_gate, ".weight")
        gate_up = weights.stacked(prefix, names.all_gate_up(sizes.num_experts), sizes.num_experts)
        down = weights.stacked(prefix, names.all_down(sizes.num_experts), sizes.num_experts)
        shared = GatedMLP(ops, weights, prefix + names.shared, names.gate_up, names.down) if names.shared else None
        return cls(ops, router, ExpertMatrices(gate_up, down, sizes.num_chosen, sizes.normalised), shared)

    def __call__(self, x: Tensor, batch: BatchT) -> Tensor:
        scores = self.ops.linear(x, self.router)
        shared = None if self.shared is None else self.shared(x, batch)
        return self.ops.experts(x, scores, self.experts, shared, batch)
