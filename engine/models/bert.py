"""Runs BERT, its MiniLM distillations and RoBERTa: post-norm encoders with learned positions and exact GELU, with or without a head
that scores pairs of texts.

Shapes: T tokens of all texts, end to end; hidden: model width. Weights are views of the model's one memory range.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.encoder_attention import attend
from engine.layers.weights import Weights
from loader.architectures.bert import Encoder
from loader.shapes.model_shape import ModelShape

QUERY_KEY_VALUE = ("query", "key", "value")


class BertLayer:
    """One layer of BERT, in this order: attention, addition, norm, MLP, addition, norm."""

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
        """Computes the layer on hidden states [T, hidden] and returns the new ones [T, hidden]. Tokens attend to all tokens of
        their own text. lengths: number of tokens of each text."""
        width = (hidden.shape[1],)
        qkv = functional.linear(hidden, self.qkv, self.qkv_bias).view(-1, 3, self.num_heads, self.head_dim)
        mixed = attend(qkv, lengths)
        hidden = functional.layer_norm(hidden + functional.linear(mixed, *self.attended), width, *self.attention_norm, self.eps)
        inner = functional.gelu(functional.linear(hidden, *self.up))
        return functional.layer_norm(hidden + functional.linear(inner, *self.down), width, *self.mlp_norm, self.eps)


class BertModel:
    def __init__(self, family: Encoder, shape: ModelShape, weights: Weights) -> None:
        prefix = shape.tensor_prefix + "embeddings."
        self.eps, self.first_position = shape.rms_norm_eps, shape.first_position
        self.words = weights.get(prefix + "word_embeddings.weight")
        self.positions = weights.get(prefix + "position_embeddings.weight")
        self.kinds = weights.get(prefix + "token_type_embeddings.weight")
        self.norm = _linear(weights, prefix + "LayerNorm")
        self.layers = [BertLayer(shape, weights, layer) for layer in range(shape.num_layers)]
        self.head = [_linear(weights, name) for name in family.score_names(shape)]

    def forward(self, input_ids: Tensor, lengths: Sequence[int], second_at: Sequence[int]) -> Tensor:
        """Returns the last hidden states [T, hidden] of texts that lie end to end. Parameters as in Encoder.forward
        (engine/models/registry.py)."""
        hidden = functional.embedding(input_ids, self.words) + self.positions[self._positions(input_ids, lengths)]
        hidden += self.kinds[0] if len(self.kinds) < 2 or not any(second_at) else self.kinds[_kinds(lengths, second_at)]
        hidden = functional.layer_norm(hidden, (hidden.shape[1],), *self.norm, self.eps)
        for layer in self.layers:
            hidden = layer(hidden, lengths)
        return hidden

    def scores(self, pooled: Tensor) -> Tensor:
        """Returns the scores [R] of pairs of texts from their pooled vectors [R, hidden]."""
        dense, out = self.head
        return functional.linear(torch.tanh(functional.linear(pooled, *dense)), *out)[:, 0]

    def _positions(self, input_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns, for each token, the index [T] of its row in the table of learned positions. In BERT these are the positions in
        the text, from 0. In RoBERTa the first position has the index after the id of the padding token; a padding token has that id
        as its index, and is not counted as a position."""
        if not self.first_position:
            return torch.cat([torch.arange(length) for length in lengths])
        padding = self.first_position - 1
        counted = (input_ids != padding).long()
        return torch.cat([text.cumsum(0) * text for text in counted.split(list(lengths))]) + padding


def _kinds(lengths: Sequence[int], second_at: Sequence[int]) -> Tensor:
    """Returns each token's segment type [T]: 1 for tokens of the second text of a pair, else 0. lengths: number of tokens of each
    text or pair. second_at: for each, the index of the first token of the pair's second text; 0: it is a single text."""
    kinds = [(torch.arange(length) >= (at or length)).long() for length, at in zip(lengths, second_at, strict=True)]
    return torch.cat(kinds)


def _linear(weights: Weights, name: str) -> tuple[Tensor, Tensor]:
    return weights.get(name + ".weight"), weights.get(name + ".bias")
