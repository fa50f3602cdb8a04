"""Grouped-query attention over paged KV, with what families add: norms of queries and keys, biases, windows, capped scores."""

from __future__ import annotations

from torch import Tensor

from engine import ops
from engine.layers.weights import Weights
from engine.steps.forward_batch import ForwardBatch
from loader.hf_config import ModelShape


class Attention:
    """x [T, hidden] -> [T, hidden]. Keys and values of the T tokens are stored before any is read. The layer's window and rotary
    embedding are its KV group's (engine/steps/forward_batch.py).

    projections: names of those that give queries, keys and values. norms_around_one: factors of their norms are 1 + weight.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        layer: int,
        projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        norms_around_one: bool = False,
    ) -> None:
        prefix = f"model.layers.{layer}.self_attn."
        self.qkv_weight = weights.matrix(prefix, projections)
        self.qkv_bias = weights.find_fused(prefix, projections, ".bias")
        self.out_weight = weights.matrix(prefix, ("o_proj",))
        self.out_bias = weights.find(prefix + "o_proj.bias")
        self.norms: ops.HeadNorms | None = None
        if shape.qk_norm:
            query_norm, key_norm = weights.get(prefix + "q_norm.weight"), weights.get(prefix + "k_norm.weight")
            self.norms = ops.HeadNorms(query_norm, key_norm, shape.rms_norm_eps, norms_around_one)
        self.layer, self.heads = layer, shape.num_heads
        self.scale, self.softcap = shape.query_scale, shape.attention_softcap

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        qkv = ops.linear(x, self.qkv_weight, self.qkv_bias)
        ops.rope_and_store(qkv, self.norms, self.layer, self.heads, batch)
        attended = ops.attention(qkv, self.layer, self.heads, self.scale, self.softcap, batch)
        return ops.linear(attended, self.out_weight, self.out_bias)
