"""Computes multi-head latent attention over paged latents (https://arxiv.org/abs/2405.04434). Shapes: T tokens."""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from engine.layers.projection import Projection
from engine.layers.weights import Weights
from engine.ops.ops import BatchT, LatentHeads, Ops
from loader.architectures.decoder import Decoder
from loader.architectures.latent import NORM_EPS
from loader.shapes.model_shape import ModelShape


class LatentAttention(Generic[BatchT]):
    """The latent attention of one layer: x [T, hidden] -> [T, hidden]. It stores the latents of the T tokens, then attends.

    It can be computed in two forms, of which each kind of device chooses one (docs/reference/models.md). In the absorbed form
    queries are mapped to the space of the latents and attend to the stored latents. In the expanded form keys and values are
    computed from the latents."""

    def __init__(self, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights, layer: int) -> None:
        assert family.latents is not None
        assert shape.latent is not None
        self.ops, self.layer, self.scale = ops, layer, shape.query_scale
        self.interleaved = shape.rope.interleaved
        names, latent, prefix = family.latents.names, shape.latent, family.names.layer.format(layer)
        self.down = Projection(ops, weights, prefix, names.read_together(latent))
        self.query_norm = weights.find(f"{prefix}{names.query_norm}.weight")
        self.queries = Projection(ops, weights, prefix, (names.query_up if latent.query_rank else names.queries,))
        self.norm = weights.get(f"{prefix}{names.norm}.weight")
        up = weights.matrix(prefix, (names.up,))
        self.heads = LatentHeads(up, shape.num_heads, latent.plain_dim, latent.rope_dim, latent.value_dim)
        self.output = Projection(ops, weights, prefix, (names.output,))

    def __call__(self, x: Tensor, batch: BatchT) -> Tensor:
        ops = self.ops
        down = self.down(x, batch)
        of_queries = x if self.query_norm is None else ops.normed_columns(down, 0, self.query_norm, NORM_EPS)
        queries = self.queries(of_queries, batch)
        ops.rope_and_store_latents(queries, down, self.norm, NORM_EPS, self.layer, self.heads, batch, self.interleaved)
        attended = ops.latent_attention(queries, self.layer, self.heads, self.scale, batch)
        return self.output(attended, batch)
