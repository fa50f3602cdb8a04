"""Grouped-query attention over paged KV, with optional RMS norms on queries and keys (Qwen3)."""

from __future__ import annotations

from torch import Tensor

from engine import ops
from engine.forward_batch import ForwardBatch
from engine.layers.weights import Weights
from loader.hf_config import ModelShape


class Attention:
    """x [T, hidden] -> [T, hidden]. Keys and values of the T tokens are stored before any is read."""

    def __init__(self, shape: ModelShape, weights: Weights, layer: int) -> None:
        prefix = f"model.layers.{layer}.self_attn."
        names = ("q_proj", "k_proj", "v_proj")
        qkv_weight = weights.fused(prefix, names, ".weight")
        assert qkv_weight is not None
        self.qkv_weight = qkv_weight
        self.qkv_bias = weights.fused(prefix, names, ".bias")
        self.out_weight = weights.get(prefix + "o_proj.weight")
        self.out_bias = weights.find(prefix + "o_proj.bias")
        self.query_norm = weights.find(prefix + "q_norm.weight")
        self.key_norm = weights.find(prefix + "k_norm.weight")
        self.eps, self.layer, self.heads = shape.rms_norm_eps, layer, shape.num_heads
        self.scale = shape.head_dim**-0.5

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        qkv = ops.linear(x, self.qkv_weight, self.qkv_bias)
        ops.rope_and_store(qkv, self.query_norm, self.key_norm, self.eps, self.layer, self.heads, batch)
        attended = ops.attention(qkv, self.layer, self.heads, self.scale, batch)
        return ops.linear(attended, self.out_weight, self.out_bias)
