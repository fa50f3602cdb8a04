"""Qwen3 (dense): as Llama, with RMS norms on each head's queries and keys before the rotary embedding.

T tokens of all rows end to end; hidden: model width; V vocabulary. Weights are views of the model's one memory range.
"""

from __future__ import annotations

from torch import Tensor

from engine import ops
from engine.layers.attention import Attention
from engine.layers.mlp import GatedMLP
from engine.layers.weights import Weights
from engine.steps.forward_batch import ForwardBatch
from loader.hf_config import ModelShape


class Qwen3Layer:
    """attention_norm -> attention -> add -> mlp_norm -> mlp; the additions are fused with the norm that follows."""

    def __init__(self, shape: ModelShape, weights: Weights, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        self.eps = shape.rms_norm_eps
        self.attention_norm = weights.get(prefix + "input_layernorm.weight")
        self.attention = Attention(shape, weights, layer)
        self.mlp_norm = weights.get(prefix + "post_attention_layernorm.weight")
        self.mlp = GatedMLP(weights, layer)

    def __call__(self, update: Tensor | None, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """update: what the layer before adds to the residual [T, hidden] (None: nothing); returns this layer's."""
        if update is None:
            normed = ops.rms_norm(residual, self.attention_norm, self.eps)
        else:
            normed = ops.add_rms_norm(update, residual, self.attention_norm, self.eps)
        update = self.attention(normed, batch)
        return self.mlp(ops.add_rms_norm(update, residual, self.mlp_norm, self.eps))


class Qwen3ForCausalLM:
    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        self.embedding = weights.get("model.embed_tokens.weight")
        self.layers = [Qwen3Layer(shape, weights, layer) for layer in range(shape.num_layers)]
        self.norm = weights.get("model.norm.weight")
        self.eps = shape.rms_norm_eps
        self.head = self.embedding if shape.tie_word_embeddings else weights.get("lm_head.weight")

    def forward(self, batch: ForwardBatch, wanted: Tensor | None) -> Tensor:
        """Stores the batch's keys and values; returns the normed hidden states [N, hidden] of the tokens `wanted` ([N] int64; None:
        all of them)."""
        residual = ops.embedding(batch.input_ids, self.embedding)
        update: Tensor | None = None
        for layer in self.layers:
            update = layer(update, residual, batch)
        assert update is not None
        if wanted is not None:
            update, residual = update[wanted], residual[wanted]
        return ops.add_rms_norm(update, residual, self.norm, self.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V]."""
        return ops.linear(hidden, self.head)
