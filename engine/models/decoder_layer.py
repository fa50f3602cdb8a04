"""Computes one layer of a decoder, of any family.

Shapes: T tokens of all rows, end to end; hidden: model width. Weights are views of the model's one memory range.
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from engine.contracts.ranks import Ranks
from engine.layers.attention import Attention
from engine.layers.beside_experts import BesideExperts
from engine.layers.experts import MixtureOfExperts
from engine.layers.gated_delta import GatedDelta
from engine.layers.latent_attention import LatentAttention
from engine.layers.layer_inputs import LayerInput
from engine.layers.mlp import MLP
from engine.layers.norms import Norm
from engine.layers.weights import Weights
from engine.ops.ops import BatchT, Ops
from loader.architectures.decoder import Decoder, has_delta_rule, has_experts, has_experts_beside
from loader.shapes.model_shape import ModelShape


class DecoderLayer(Generic[BatchT]):
    """A layer of a decoder. It computes, in this order: attention_norm, attention (or the gated delta rule), attended_norm,
    addition to the residual, mlp_norm, MLP, mlp_output_norm. Each family has some of these norms. An addition is fused with the
    norm that follows it.

    In families with parallel branches, the MLP reads the same input as attention. In some families a layer also adds an update
    computed from an additional input of the layer, and multiplies the residual by a scalar at the end; such layers leave no
    addition to the next layer.

    In a split model, attention, MLP and experts each compute only this device's partial result; the ranks (devices) add up these
    results before anything else reads them."""

    def __init__(
        self, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights, layer: int, ranks: Ranks | None = None
    ) -> None:
        self.ops, self.ranks = ops, ranks
        names, prefix = family.names, family.names.layer.format(layer)
        self.parallel, self.scale = shape.parallel_branches, shape.branch_scale
        of_norm = (ops, family, shape, weights, prefix)
        self.attention_norm = Norm.named(*of_norm, names.attention_norm)
        self.attention: Attention[BatchT] | LatentAttention[BatchT] | GatedDelta[BatchT]
        if has_delta_rule(shape, layer):
            self.attention = GatedDelta(ops, family, shape, weights, layer)
        elif shape.latent is not None:
            self.attention = LatentAttention(ops, family, shape, weights, layer)
        else:
            self.attention = Attention(ops, family, shape, weights, layer, ranks)
        self.attended_norm = Norm.named(*of_norm, names.attended_norm)
        self.mlp_norm = Norm.named(*of_norm, names.mlp_norm)
        self.mlp: MLP | MixtureOfExperts[BatchT]
        if has_experts(shape, layer):
            self.mlp = MixtureOfExperts.of_layer(ops, family, shape, weights, layer, ranks)
        else:
            self.mlp = MLP.of_layer(ops, family, shape, weights, layer)
        self.experts = BesideExperts(ops, family, shape, weights, layer, ranks) if has_experts_beside(shape) else None
        self.mlp_output_norm = Norm.named(*of_norm, names.mlp_output_norm)
        self.input = LayerInput(ops, family, shape, weights, layer) if shape.layer_inputs is not None else None
        self.scalar = weights.get(prefix + names.layer_scalar) if names.layer_scalar else None

    def __call__(self, update: Tensor | None, residual: Tensor, batch: BatchT) -> Tensor | None:
        """Computes the layer, and returns its update, which the next layer is to add to the residual; None if this layer has added
        it. update [T, hidden]: the update that the previous layer returned; None: there is none. residual [T, hidden]: changed in
        place."""
        read = self._added(update, residual, self.attention_norm)
        attended = self._joined(self.attention(read, batch))
        if self.attended_norm is not None:
            attended = self.attended_norm(attended)
        if self.parallel:
            update = self._joined(self.mlp(read, batch))
            self.ops.add(attended, residual, self.scale)
        else:
            del read  # the MLP's arrays are the largest of a step: what nobody reads any more shall not lie beside them
            read = self._added(attended, residual, self.mlp_norm)
            del attended
            update = self._joined(self.mlp(read, batch))
        if self.experts is not None:
            update = self.experts(update, residual, batch)
        if self.mlp_output_norm is not None:
            update = self.mlp_output_norm(update)
        if self.input is not None:
            self.ops.add(update, residual, self.scale)
            update = self.input(residual, batch)
        if self.scalar is None:
            return update
        self.ops.add_and_scale(update, residual, self.scalar)
        return None

    def _joined(self, made: Tensor) -> Tensor:
        """Adds to `made`, in place, the partial results that the other ranks (devices) of a split model have computed, and returns
        it."""
        if self.ranks is not None:
            self.ranks.sum(made)
        return made

    def _added(self, update: Tensor | None, residual: Tensor, norm: Norm | None) -> Tensor:
        """Adds the update, unless it is None, to the residual in place. Returns what attention or the MLP reads: the norm of the
        residual, or the residual itself if `norm` is None."""
        if norm is None:
            if update is not None:
                self.ops.add(update, residual, self.scale)
            return residual
        return norm(residual) if update is None else norm.of_sum(update, residual)
