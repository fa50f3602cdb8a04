"""Gemma 2: norms before and after each branch, capped attention scores and logits, every second layer within a window.

T tokens of all rows end to end; hidden: model width; V vocabulary. Weights are views of the model's one memory range. Norms
multiply by 1 + weight; embeddings are scaled by the square root of the width, rounded to their dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine import ops
from engine.layers.attention import Attention
from engine.layers.mlp import GatedMLP
from engine.layers.weights import Weights
from engine.steps.forward_batch import ForwardBatch
from loader.hf_config import ModelShape


class Gemma2Layer:
    """norm -> attention -> norm -> add -> norm -> mlp -> norm; the additions are fused with the norm that follows."""

    def __init__(self, shape: ModelShape, weights: Weights, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        self.eps = shape.rms_norm_eps
        self.attention_norm = weights.get(prefix + "input_layernorm.weight")
        self.attention = Attention(shape, weights, layer, norms_around_one=True)
        self.attended_norm = weights.get(prefix + "post_attention_layernorm.weight")
        self.mlp_norm = weights.get(prefix + "pre_feedforward_layernorm.weight")
        self.mlp = GatedMLP(weights, layer, activate=ops.gelu_and_mul)
        self.out_norm = weights.get(prefix + "post_feedforward_layernorm.weight")

    def __call__(self, update: Tensor | None, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """update: what the layer before adds to the residual [T, hidden] (None: nothing); returns this layer's."""
        if update is None:
            normed = ops.rms_norm(residual, self.attention_norm, self.eps, around_one=True)
        else:
            normed = ops.add_rms_norm(update, residual, self.attention_norm, self.eps, around_one=True)
        update = ops.rms_norm(self.attention(normed, batch), self.attended_norm, self.eps, around_one=True)
        normed = ops.add_rms_norm(update, residual, self.mlp_norm, self.eps, around_one=True)
        return ops.rms_norm(self.mlp(normed), self.out_norm, self.eps, around_one=True)


class Gemma2ForCausalLM:
    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        self.embedding = weights.get("model.embed_tokens.weight")
        self.embedding_scale = torch.tensor(shape.hidden_size**0.5, dtype=self.embedding.dtype).item()
        self.layers = [Gemma2Layer(shape, weights, layer) for layer in range(shape.num_layers)]
        self.norm = weights.get("model.norm.weight")
        self.eps, self.logit_softcap = shape.rms_norm_eps, shape.logit_softcap
        self.head = self.embedding if shape.tie_word_embeddings else weights.get("lm_head.weight")

    def forward(self, batch: ForwardBatch, wanted: Tensor | None) -> Tensor:
        """Stores the batch's keys and values; returns the normed hidden states [N, hidden] of the tokens `wanted` ([N] int64; None:
        all of them)."""
        residual = ops.embedding(batch.input_ids, self.embedding, self.embedding_scale)
        update: Tensor | None = None
        for layer in self.layers:
            update = layer(update, residual, batch)
        assert update is not None
        if wanted is not None:
            update, residual = update[wanted], residual[wanted]
        return ops.add_rms_norm(update, residual, self.norm, self.eps, around_one=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V]."""
        return ops.softcap(ops.linear(hidden, self.head), self.logit_softcap)
