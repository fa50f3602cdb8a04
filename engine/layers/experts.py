"""Computes a mixture of experts: the feed-forward part of a layer, in which each token passes through a few of many small networks.
Shapes: T tokens, E experts.
"""

from __future__ import annotations

from typing import Generic

import torch
from torch import Tensor

from engine.contracts.ranks import Ranks
from engine.layers.mlp import MLP
from engine.layers.weights import Weights
from engine.ops.ops import BatchT, ClampedSwiglu, ExpertMatrices, ExpertMatrix, Ops, SigmoidRouting
from loader.architectures.decoder import GELU_TANH, Decoder
from loader.shapes import expert_copies
from loader.shapes.model_shape import ALTERNATING, INPUT_MAJOR, ExpertShape, ModelShape


class MixtureOfExperts(Generic[BatchT]):
    """The feed-forward part of one layer, with experts: x [T, hidden] -> [T, hidden].

    router [E, hidden]: the matrix whose product with x gives each token's scores of the experts. If there is a shared expert with a
    gate, row E holds the gate's weights, so that one matrix multiplication gives scores and gate. The router is float32 if
    ExpertMatrices.sigmoid is set. router_bias [E]: added to the scores; None: there is none. shared: an expert that all tokens pass
    through; None: there is none.

    In a split model each rank (device) routes all tokens, and computes the outputs of its own experts, or of its part of each
    expert. The caller must then add up the results of all ranks."""

    def __init__(
        self,
        ops: Ops[BatchT],
        router: Tensor,
        experts: ExpertMatrices,
        shared: MLP | None,
        router_bias: Tensor | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ops, self.router, self.experts, self.shared, self.router_bias = ops, router, experts, shared, router_bias
        self.ranks = ranks

    @classmethod
    def of_layer(
        cls, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights, layer: int, ranks: Ranks | None = None
    ) -> MixtureOfExperts[BatchT]:
        assert family.experts is not None
        assert shape.experts is not None
        names, sizes, prefix = family.experts.names, shape.experts, family.names.layer.format(layer)
        router = weights.fused(prefix, names.router_and_gate, ".weight")
        own, turns = shape.experts_of(layer), _turns(shape, layer, router.device)
        if sizes.stack == ALTERNATING:
            experts = _stacked(weights, prefix + names.stacked_gate_up, prefix + names.stacked_down, sizes, layer, turns)
            return cls(ops, router, experts, None, weights.find(f"{prefix}{names.router}.bias"), ranks)
        gate_up: ExpertMatrix
        down: ExpertMatrix
        if sizes.stacked:
            gate_up, down = (weights.get(prefix + name) for name in (names.stacked_gate_up, names.stacked_down))
            if sizes.stack == INPUT_MAJOR:
                gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        else:
            gate_up = weights.stacked(prefix, names.all_gate_up(own), len(own))
            down = weights.stacked(prefix, names.all_down(own), len(own))
        shared = MLP(ops, weights, prefix + names.shared, names.gate_up, names.down) if names.shared else None
        sigmoid = None
        if (rule := sizes.sigmoid) is not None:
            correction = weights.get(prefix + names.correction) if names.correction else router.new_zeros(len(router))
            sigmoid = SigmoidRouting(correction, rule.num_groups, rule.num_chosen_groups, rule.factor, rule.by_softmax)
        how = (sizes.num_chosen, sizes.normalised)
        beside = family.experts.beside
        experts = ExpertMatrices(
            gate_up,
            down,
            *how,
            sigmoid=sigmoid,
            weighs_inputs=sizes.weighs_inputs,
            gelu=family.activation == GELU_TANH,
            factors=None if beside is None else weights.get(prefix + beside.expert_scale),
            first_own=own[0],
            num_routed=sizes.num_experts,
            counts=weights.expert_counts(layer),
            turns=turns,
        )
        return cls(ops, router, experts, shared, None, ranks)

    def __call__(self, x: Tensor, batch: BatchT) -> Tensor:
        if self.experts.sigmoid is None:
            scores = self.ops.linear(x, self.router, self.router_bias)
        else:
            scores = self.ops.linear_float32(x, self.router)
        self.agree(scores)
        shared = None if self.shared is None else self.shared(x, batch)
        return self.ops.experts(x, scores, self.experts, shared, batch)

    def agree(self, scores: Tensor) -> None:
        """Overwrites the router's scores by those of the first rank, on all ranks (devices) of a split model, so that all ranks
        choose the same experts even where scores are nearly equal. Does nothing if the model is whole."""
        if self.ranks is not None:
            self.ranks.share_first(scores)


def _turns(shape: ModelShape, layer: int, device: torch.device) -> Tensor | None:
    """Returns which of the ranks (devices) that hold copies of an expert computes which of its tokens, for one layer, as a tensor
    (see ExpertMatrices.turns); None if no rank has copies of other ranks' experts."""
    split, experts = shape.split, shape.experts
    if split is None or not split.copies or experts is None:
        return None
    return torch.tensor(expert_copies.turns(split, layer, experts), dtype=torch.int32, device=device)


def _stacked(weights: Weights, gate_up: str, down: str, sizes: ExpertShape, layer: int, turns: Tensor | None) -> ExpertMatrices:
    """Returns the experts of a layer whose checkpoint stores the matrices of all experts in one tensor. gate_up, down: the name of
    the tensor with the gate and up matrices, and of the one with the down matrices. sizes: the experts' settings. turns:
    ExpertMatrices.turns."""
    return ExpertMatrices(
        weights.stack(gate_up),
        weights.stack(down),
        sizes.num_chosen,
        sizes.normalised,
        weights.find(f"{gate_up}_bias"),
        weights.find(f"{down}_bias"),
        ClampedSwiglu(sizes.swiglu_limit, sizes.swiglu_alpha) if sizes.swiglu_limit else None,
        first_own=sizes.own.start,
        num_routed=sizes.num_experts,
        counts=weights.expert_counts(layer),
        turns=turns,
    )
