"""Computes grouped-query attention over paged KV, with the variations of model families: norms of queries and keys, biases, sliding
windows, capped scores, sinks and gates. Shapes: T tokens."""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from engine.contracts.ranks import Ranks
from engine.layers.projection import Projection
from engine.layers.weights import Weights
from engine.ops.ops import BatchT, HeadNorms, Ops
from loader.architectures.decoder import Decoder
from loader.shapes.model_shape import ModelShape


class Attention(Generic[BatchT]):
    """The attention of one layer: x [T, hidden] -> [T, hidden]. It stores the keys and values of the T tokens, then attends. A
    layer that uses the KV of another layer computes only queries, and stores nothing. The sliding window and the frequencies of the
    rotary embedding (RoPE) are properties of the layer's KV group (the layers that share block tables), which the batch holds.
    ranks: the connection to the other devices of a split model, used by norms over the heads of all devices; None: the model is
    whole."""

    def __init__(
        self, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights, layer: int, ranks: Ranks | None = None
    ) -> None:
        self.ops, self.ranks = ops, ranks
        names, prefix = family.names, family.names.layer.format(layer)
        heads = shape.heads_of(layer)
        self.qkv = Projection(ops, weights, prefix, names.of_heads(heads))
        self.output = Projection(ops, weights, prefix, (names.attention_output,))
        norms: HeadNorms | None = None
        if names.query_norm and shape.has_head_norms:
            query_norm = weights.get(f"{prefix}{names.query_norm}.weight")
            key_norm = query_norm if heads.reads_only else weights.get(f"{prefix}{names.key_norm}.weight")
            value_norm = weights.ones(heads.head_dim) if family.value_norms else None
            norms = HeadNorms(query_norm, key_norm, shape.rms_norm_eps, family.norms_around_one, value_norm)
        rotated = layer not in shape.unrotated_layers
        if shape.unit_norms and rotated:  # may be applied before the rotation, which does not change a head's norm
            ones = weights.ones(shape.head_dim)
            norms = HeadNorms(ones, ones, shape.rms_norm_eps)
        self.head_norms = None if family.whole_width_norms else norms
        self.whole_width_norms = norms if family.whole_width_norms else None
        self.sinks = weights.get(prefix + names.sinks) if names.sinks else None
        self.layer, self.heads, self.head_dim = layer, shape.num_heads, heads.head_dim
        self.gated, self.keys_are_values, self.reads_only = shape.gated_attention, heads.keys_are_values, heads.reads_only
        self.num_turned = shape.num_heads + heads.num_kv_heads
        if not rotated:
            self.num_turned = 0 if shape.temperature is None else shape.num_heads
        self.scale, self.softcap = shape.query_scale, shape.attention_softcap
        self.interleaved = shape.rope.interleaved

    def __call__(self, x: Tensor, batch: BatchT) -> Tensor:
        ops = self.ops
        made = self.qkv(x, batch)
        if self.reads_only:
            ops.rope(made, self.head_norms, self.layer, self.heads, batch, self.interleaved)
            attended = ops.attention(made, self.layer, self.heads, self.scale, self.softcap, batch, self.sinks)
            return self.output(attended, batch)
        qkv = ops.without_gates(made, self.heads, self.head_dim) if self.gated else made
        if self.keys_are_values:
            qkv = ops.columns_twice(made, self.heads * self.head_dim)
        if (norms := self.whole_width_norms) is not None:
            self._norm_all_heads(qkv, norms)
        ops.rope_and_store(qkv, self.head_norms, self.layer, self.heads, batch, self.interleaved, self.num_turned)
        attended = ops.attention(qkv, self.layer, self.heads, self.scale, self.softcap, batch, self.sinks)
        if self.gated:
            ops.gate_heads(attended, made, self.head_dim)
        return self.output(attended, batch)

    def _norm_all_heads(self, qkv: Tensor, norms: HeadNorms) -> None:
        """Applies two norms to columns of qkv, in place: one over all queries of a token, one over all its keys. In a split model
        the sums of squares are added up over the ranks (devices). If a key head is replicated on several ranks, it is counted
        several times in the sum of squares and in the number of columns alike, so the mean is still right."""
        if self.ranks is None:
            self.ops.norm_columns(qkv, 0, norms.query, norms.eps, norms.around_one)
            self.ops.norm_columns(qkv, len(norms.query), norms.key, norms.eps, norms.around_one)
            return
        squares = self.ops.column_squares(qkv, (len(norms.query), len(norms.key)))
        self.ranks.sum(squares)
        self.ops.norm_columns_by(qkv, (norms.query, norms.key), squares, self.ranks.size, norms.eps)
