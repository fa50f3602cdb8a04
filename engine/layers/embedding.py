"""Looks up the embeddings of a decoder's tokens. Shapes: T tokens, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.contracts.ranks import Ranks
from engine.layers.weights import Weights
from engine.ops.ops import Ops
from loader.architectures.decoder import Decoder
from loader.shapes.model_shape import ModelShape


class Embedding:
    """A decoder's token embedding. It looks up rows of `weight` [V, hidden], and multiplies them by the model's factor. ranks: the
    connection to the other devices of a split model, each of which has some of the rows; None: this device has all rows."""

    def __init__(self, ops: Ops[Any], family: Decoder, shape: ModelShape, weights: Weights, ranks: Ranks | None = None) -> None:
        self.ops, self.weight, self.scale = ops, weights.table(f"{family.names.embedding}.weight"), shape.embedding_scale
        self.ranks, self.first = ranks, None if ranks is None else ranks.rank * (shape.vocab_size // ranks.size)
        if family.scales_embeddings:  # the factor is rounded to the embeddings' dtype
            self.scale = torch.tensor(shape.hidden_size**0.5, dtype=self.weight.dtype).item()

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Returns the embeddings [T, hidden] of input_ids [T] int64."""
        rows = self.ops.embedding(input_ids, self.weight, self.scale, self.first)
        if self.ranks is not None:
            self.ranks.sum(rows)
        return rows
