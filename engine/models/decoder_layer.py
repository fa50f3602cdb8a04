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
    addition to the residual, mlp_norm, MLP, mlp_output_norm. Each family has only some of these norms. An addition is fused with
    the norm that follows it.

    In families with parallel branches, the MLP reads the same input as attention. In some families a layer has an additional input,
    from which it computes a further update. In some families a layer ends by multiplying the residual by a scalar; before that it
    adds its last update to the residual itself, instead of returning it.

    In a split model, attention, MLP and experts each compute only this device's partial result; the ranks (devices) add up these
    results before they are used."""

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
        """Computes the layer and returns its update [T, hidden], which the caller, usually the next layer, must add to the
        residual; None if the layer has added it itself. update [T, hidden]: the previous layer's update, which is added first;
        None: there is none. residual [T, hidden]: changed in place."""
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
        """Returns `made`, to which the partial results that the other ranks (devices) of a split model have computed were added in
        place. If the model is whole, `made` is not changed."""
        if self.ranks is not None:
            self.ranks.sum(made)
        return made

    def _added(self, update: Tensor | None, residual: Tensor, norm: Norm | None) -> Tensor:
        """Adds the update to the residual in place, unless it is None. Returns the input of attention or of the MLP: the norm of
        the residual, or the residual itself if `norm` is None."""
        if norm is None:
            if update is not None:
                self.ops.add(update, residual, self.scale)
            return residual
        return norm(residual) if update is None else norm.of_sum(update, residual)
