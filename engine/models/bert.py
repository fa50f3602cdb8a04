"""BERT and its MiniLM distillations: post-norm encoder, learned positions, exact GELU; no causal mask and no KV.

T tokens of all texts end to end; hidden: model width. Weights are views of the model's one memory range.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.weights import Weights
from loader.model_shape import ModelShape

QUERY_KEY_VALUE = ("query", "key", "value")


class BertLayer:
    """One layer of BERT: attention, addition, norm, MLP, addition, norm."""

    def __init__(self, shape: ModelShape, weights: Weights, layer: int) -> None:
        prefix = f"{shape.tensor_prefix}encoder.layer.{layer}."
        self.num_heads, self.head_dim = shape.num_heads, shape.head_dim
        self.eps = shape.rms_norm_eps
        self.qkv = weights.fused(prefix + "attention.self.", QUERY_KEY_VALUE, ".weight")
        self.qkv_bias = weights.fused(prefix + "attention.self.", QUERY_KEY_VALUE, ".bias")
        self.attended = _linear(weights, prefix + "attention.output.dense")
        self.attention_norm = _linear(weights, prefix + "attention.output.LayerNorm")
        self.up = _linear(weights, prefix + "intermediate.dense")
        self.down = _linear(weights, prefix + "output.dense")
        self.mlp_norm = _linear(weights, prefix + "output.LayerNorm")

    def __call__(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Computes the layer: [T, hidden] -> [T, hidden]. Tokens attend to all tokens of their own text. lengths: tokens of each
        text."""
        width = (hidden.shape[1],)
        qkv = functional.linear(hidden, self.qkv, self.qkv_bias).view(-1, 3, self.num_heads, self.head_dim)
        mixed = torch.empty_like(hidden)
        start = 0
        for length in lengths:
            query, key, value = qkv[start : start + length].permute(1, 2, 0, 3)[:, None]
            row = functional.scaled_dot_product_attention(query, key, value)[0]  # [heads, length, head_dim]
            mixed[start : start + length] = row.transpose(0, 1).reshape(length, -1)
            start += length
        hidden = functional.layer_norm(hidden + functional.linear(mixed, *self.attended), width, *self.attention_norm, self.eps)
        inner = functional.gelu(functional.linear(hidden, *self.up))
        return functional.layer_norm(hidden + functional.linear(inner, *self.down), width, *self.mlp_norm, self.eps)


class BertModel:
    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        prefix = shape.tensor_prefix + "embeddings."
        self.eps = shape.rms_norm_eps
        self.words = weights.get(prefix + "word_embeddings.weight")
        self.positions = weights.get(prefix + "position_embeddings.weight")
        self.kind = weights.get(prefix + "token_type_embeddings.weight")[0]  # all text is the first segment
        self.norm = _linear(weights, prefix + "LayerNorm")
        self.layers = [BertLayer(shape, weights, layer) for layer in range(shape.num_layers)]

    def forward(self, input_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns the last hidden states [T, hidden]. input_ids [T] int64: the texts, one after the other. lengths: tokens of
        each."""
        positions = torch.cat([torch.arange(length) for length in lengths])
        hidden = functional.embedding(input_ids, self.words) + self.positions[positions] + self.kind
        hidden = functional.layer_norm(hidden, (hidden.shape[1],), *self.norm, self.eps)
        for layer in self.layers:
            hidden = layer(hidden, lengths)
        return hidden


def _linear(weights: Weights, name: str) -> tuple[Tensor, Tensor]:
    return weights.get(name + ".weight"), weights.get(name + ".bias")
