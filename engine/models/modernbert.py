"""Runs ModernBERT: a pre-norm encoder with rotary embedding (RoPE) and a gated MLP, with or without a head that scores pairs of
texts. In most layers a token attends only to a window of tokens around it.

Shapes: T tokens of all texts, end to end; hidden: model width. Weights are views of the model's one memory range.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.encoder_attention import attend
from engine.layers.rope import rotaries_of
from engine.layers.weights import Weights
from engine.ops import reference
from engine.ops.ops import Rotary
from loader.shapes.model_shape import ModelShape


class ModernBertLayer:
    """One layer of ModernBERT, in this order: norm, attention, addition, norm, gated MLP, addition. The first layer has no norm
    before its attention."""

    def __init__(self, shape: ModelShape, weights: Weights, layer: int) -> None:
        prefix = f"{shape.tensor_prefix}layers.{layer}."
        self.num_heads, self.head_dim = shape.num_heads, shape.head_dim
        self.eps, self.window = shape.rms_norm_eps, shape.layer_windows[layer]
        self.attention_norm = weights.find(prefix + "attn_norm.weight")
        self.qkv = _linear(weights, prefix + "attn.Wqkv")
        self.attended = _linear(weights, prefix + "attn.Wo")
        self.mlp_norm = weights.get(prefix + "mlp_norm.weight")
        self.up_gate = _linear(weights, prefix + "mlp.Wi")
        self.down = _linear(weights, prefix + "mlp.Wo")

    def __call__(self, hidden: Tensor, lengths: Sequence[int], cos_sin: Tensor) -> Tensor:
        """Computes the layer on hidden states [T, hidden] and returns the new ones [T, hidden]. lengths: number of tokens of each
        text. cos_sin [T, D]: cosines, then sines, of the layer's rotary embedding."""
        normed = hidden if self.attention_norm is None else _norm(hidden, self.attention_norm, self.eps)
        qkv = functional.linear(normed, *self.qkv).view(-1, 3 * self.num_heads, self.head_dim)
        turned = qkv[:, : 2 * self.num_heads]  # queries and keys
        turned.copy_(reference.rotate(turned, cos_sin))
        mixed = attend(qkv.view(-1, 3, self.num_heads, self.head_dim), lengths, self.window)
        hidden = hidden + functional.linear(mixed, *self.attended)
        up, gate = functional.linear(_norm(hidden, self.mlp_norm, self.eps), *self.up_gate).chunk(2, dim=-1)
        return hidden + functional.linear(functional.gelu(up) * gate, *self.down)


class ModernBertModel:
    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        prefix = shape.tensor_prefix
        self.eps = shape.rms_norm_eps
        self.words = weights.get(prefix + "embeddings.tok_embeddings.weight")
        self.norm = weights.get(prefix + "embeddings.norm.weight")
        self.layers = [ModernBertLayer(shape, weights, layer) for layer in range(shape.num_layers)]
        self.final_norm = weights.get(prefix + "final_norm.weight")
        self.wide, self.near = rotaries_of(shape, shape.max_position_embeddings)
        if shape.scoring:
            self.dense, self.head_norm = weights.get("head.dense.weight"), weights.get("head.norm.weight")
            self.out = _linear(weights, "classifier")

    def forward(self, input_ids: Tensor, lengths: Sequence[int], second_at: Sequence[int]) -> Tensor:
        """Returns the last hidden states [T, hidden] of texts that lie end to end. Parameters as in Encoder.forward
        (engine/models/registry.py); second_at is ignored, because the family has no segments."""
        positions = torch.cat([torch.arange(length) for length in lengths])
        wide, near = _cos_sin(self.wide, positions), _cos_sin(self.near, positions)
        hidden = _norm(functional.embedding(input_ids, self.words), self.norm, self.eps)
        for layer in self.layers:
            hidden = layer(hidden, lengths, near if layer.window else wide)
        return _norm(hidden, self.final_norm, self.eps)

    def scores(self, pooled: Tensor) -> Tensor:
        """Returns the scores [R] of pairs of texts from their pooled vectors [R, hidden]."""
        inner = _norm(functional.gelu(functional.linear(pooled, self.dense)), self.head_norm, self.eps)
        return functional.linear(inner, *self.out)[:, 0]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, (x.shape[1],), weight, None, eps)


def _cos_sin(rotary: Rotary, positions: Tensor) -> Tensor:
    """Returns [T, D] float32: for each token, the cosines, then the sines, of the angles of the rotary embedding (RoPE) at its
    position."""
    angles = positions[:, None].float() * rotary.inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _linear(weights: Weights, name: str) -> tuple[Tensor, Tensor | None]:
    return weights.get(name + ".weight"), weights.find(name + ".bias")
