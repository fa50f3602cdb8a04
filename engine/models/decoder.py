"""Decoders: Llama, Mixtral, Mistral, Qwen, Phi, Gemma, OLMo, DeepSeek, and what else `loader.architectures.decoder.Decoder` can
describe.

T tokens of all rows end to end; hidden: model width; V vocabulary. Weights are views of the model's one memory range.
"""

from __future__ import annotations

from typing import Generic

import torch
from torch import Tensor

from engine.layers.attention import Attention
from engine.layers.experts import MixtureOfExperts
from engine.layers.gated_delta import GatedDelta
from engine.layers.latent_attention import LatentAttention
from engine.layers.mlp import GatedMLP
from engine.layers.weights import Weights
from engine.ops.ops import BatchT, Ops
from loader.architectures.decoder import Decoder, has_delta_rule, has_experts
from loader.model_shape import ModelShape


class DecoderLayer(Generic[BatchT]):
    """One layer: attention_norm, attention (or a gated delta rule), attended_norm, addition, mlp_norm, MLP, mlp_output_norm. A
    family has some of these norms. Additions are fused with the norm that follows."""

    def __init__(self, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights, layer: int) -> None:
        self.ops = ops
        names, prefix = family.names, family.names.layer.format(layer)
        self.eps, self.around_one = shape.rms_norm_eps, family.norms_around_one
        self.attention_norm = weights.get(f"{prefix}{names.attention_norm}.weight") if names.attention_norm else None
        attention = GatedDelta if has_delta_rule(shape, layer) else Attention if shape.latent is None else LatentAttention
        self.attention: Attention[BatchT] | LatentAttention[BatchT] | GatedDelta[BatchT] = attention(
            ops, family, shape, weights, layer
        )
        self.attended_norm = weights.get(f"{prefix}{names.attended_norm}.weight") if names.attended_norm else None
        self.mlp_norm = weights.get(f"{prefix}{names.mlp_norm}.weight") if names.mlp_norm else None
        mlp = MixtureOfExperts if has_experts(shape, layer) else GatedMLP
        self.mlp: GatedMLP | MixtureOfExperts[BatchT] = mlp.of_layer(ops, family, shape, weights, layer)
        self.mlp_output_norm = weights.get(f"{prefix}{names.mlp_output_norm}.weight") if names.mlp_output_norm else None

    def __call__(self, update: Tensor | None, residual: Tensor, batch: BatchT) -> Tensor:
        """Returns what this layer adds to the residual [T, hidden]. update: what the layer before adds to it (None: nothing)."""
        update = self.attention(self._added(update, residual, self.attention_norm), batch)
        if self.attended_norm is not None:
            update = self.ops.rms_norm(update, self.attended_norm, self.eps, self.around_one)
        update = self.mlp(self._added(update, residual, self.mlp_norm), batch)
        if self.mlp_output_norm is not None:
            update = self.ops.rms_norm(update, self.mlp_output_norm, self.eps, self.around_one)
        return update

    def _added(self, update: Tensor | None, residual: Tensor, norm: Tensor | None) -> Tensor:
        """Adds the update to the residual in place; returns what a branch reads of it: its norm, or itself where there is none."""
        if norm is None:
            if update is not None:
                self.ops.add(update, residual)
            return residual
        if update is None:
            return self.ops.rms_norm(residual, norm, self.eps, self.around_one)
        return self.ops.add_rms_norm(update, residual, norm, self.eps, self.around_one)


class DecoderModel(Generic[BatchT]):
    def __init__(self, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights) -> None:
        self.ops = ops
        names = family.names
        self.embedding = weights.get(f"{names.embedding}.weight")
        scale = shape.hidden_size**0.5 if family.scales_embeddings else 1.0
        self.embedding_scale = torch.tensor(scale, dtype=self.embedding.dtype).item()  # rounded as the embeddings are
        self.layers = [DecoderLayer(ops, family, shape, weights, layer) for layer in range(shape.num_layers)]
        self.norm = weights.get(f"{names.final_norm}.weight")
        self.eps, self.around_one, self.logit_softcap = shape.rms_norm_eps, family.norms_around_one, shape.logit_softcap
        self.head = self.embedding if shape.tie_word_embeddings else weights.get(f"{names.head}.weight")

    def forward(self, batch: BatchT, wanted: Tensor | None) -> Tensor:
        """Stores the batch's keys and values; returns the normed hidden states [N, hidden] of the tokens `wanted` ([N] int64; None:
        all of them)."""
        residual = self.ops.embedding(batch.input_ids, self.embedding, self.embedding_scale)
        update: Tensor | None = None
        for layer in self.layers:
            update = layer(update, residual, batch)
        assert update is not None
        if wanted is not None:
            update, residual = update[wanted], residual[wanted]
        return self.ops.add_rms_norm(update, residual, self.norm, self.eps, self.around_one)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [N, V] of hidden states [N, hidden]."""
        return self.ops.softcap(self.ops.linear(hidden, self.head), self.logit_softcap)
