"""Computes a mixture of experts in addition to the MLP of a layer. Both read the same residual, each through a norm of its own, and
their outputs are added up. Shapes: T tokens."""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from engine.contracts.ranks import Ranks
from engine.layers.experts import MixtureOfExperts
from engine.layers.norms import Norm
from engine.layers.weights import Weights
from engine.ops.ops import BatchT, Ops
from loader.architectures.decoder import Decoder
from loader.shapes.model_shape import ModelShape


class BesideExperts(Generic[BatchT]):
    """A mixture of experts that is computed in addition to the MLP of one layer. A call takes the MLP's output, and returns the sum
    of it and the experts' output. The router reads the normalised residual, multiplied by a factor for each dimension and by 1 /
    sqrt(hidden). ranks: the connection to the other devices of a split model; None: the model is whole."""

    def __init__(
        self,
        ops: Ops[BatchT],
        family: Decoder,
        shape: ModelShape,
        weights: Weights,
        layer: int,
        ranks: Ranks | None = None,
    ) -> None:
        assert family.experts is not None
        assert family.experts.beside is not None
        names, prefix = family.experts.beside, family.names.layer.format(layer)
        self.ops, self.eps, self.input_scale = ops, shape.rms_norm_eps, shape.hidden_size**-0.5
        self.mixture = MixtureOfExperts.of_layer(ops, family, shape, weights, layer, ranks)
        self.router_scale = weights.get(prefix + names.router_scale)
        of_norm = (ops, family, shape, weights)
        self.mlp_output_norm = Norm(*of_norm, prefix + names.mlp_output_norm)
        self.norm = Norm(*of_norm, prefix + names.norm)
        self.output_norm = Norm(*of_norm, prefix + names.output_norm)

    def __call__(self, update: Tensor, residual: Tensor, batch: BatchT) -> Tensor:
        """Returns the sum [T, hidden] of the MLP's output and the experts' output, each normalised by a norm of its own. update [T,
        hidden]: the MLP's output. residual [T, hidden]: the states that the MLP has read and the experts read; it is not
        changed."""
        ops, mixture = self.ops, self.mixture
        of_mlp = self.mlp_output_norm(update)
        # scaled before the product, as in transformers: rounding the scores once more would choose other experts
        normed = ops.scaled(ops.rms_norm(residual, self.router_scale, self.eps), self.input_scale)
        scores = ops.linear(normed, mixture.router)
        mixture.agree(scores)
        of_experts = ops.experts(self.norm(residual), scores, mixture.experts, None, batch)
        if mixture.ranks is not None:
            mixture.ranks.sum(of_experts)
        made = self.output_norm(of_experts)
        ops.add(of_mlp, made)
        return made
