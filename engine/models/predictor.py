"""Runs a decoder's additional layer for multi-token prediction, which predicts one token further than the decoder
(loader/architectures/predictor.py). Its predictions are only drafts, which the decoder checks.

Shapes: T tokens of all rows, end to end; hidden: model width; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import torch
from torch import Tensor

from engine.layers.embedding import Embedding
from engine.layers.norms import Norm
from engine.layers.weights import Weights
from engine.models.decoder_layer import DecoderLayer
from engine.ops.ops import BatchT, Ops
from loader.architectures.decoder import Decoder
from loader.architectures.predictor import HIDDEN_NORM, OUTPUT_NORM, PROJECTION, TOKEN_NORM
from loader.shapes.model_shape import ModelShape


class Predictor(Generic[BatchT]):
    """A decoder's additional layer that drafts tokens. For each token it reads the decoder's last hidden state and the embedding of
    the next token; its own hidden state then predicts the token after that next one. To draft further tokens, it reads its own last
    hidden state instead of the decoder's. Its keys and values are stored apart from those of the decoder's layers. embedding: the
    decoder's embedding."""

    def __init__(self, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights, embedding: Embedding) -> None:
        prefix = family.names.layer.format(shape.num_layers)
        of_norm = (ops, family, shape, weights)
        self.ops, self.embedding = ops, embedding
        self.token_norm, self.hidden_norm = Norm(*of_norm, prefix + TOKEN_NORM), Norm(*of_norm, prefix + HIDDEN_NORM)
        self.projection = weights.get(f"{prefix}{PROJECTION}.weight")
        self.layer = DecoderLayer(ops, family, shape, weights, shape.num_layers)
        self.norm = Norm(*of_norm, prefix + OUTPUT_NORM)

    def read(self, kept: Sequence[Tensor]) -> Tensor:
        """Returns the states with which the predictor begins, [T, hidden]: the decoder's last hidden states, after the final norm.
        kept: a list with only this tensor."""
        return kept[0]

    def __call__(self, states: Tensor, batch: BatchT) -> Tensor:
        """Computes the predictor for a batch, stores its keys and values at the batch's positions, and returns its hidden states
        [T, hidden]. In this batch, the input at position p must be the token at position p + 1 of the text. states [T, hidden]: the
        result of `read`, or of an earlier call."""
        embedded = self.embedding(batch.input_ids)
        read = torch.cat((self.token_norm(embedded), self.hidden_norm(states)), dim=1)
        residual = self.ops.linear(read, self.projection)
        update = self.layer(None, residual, batch)
        if update is not None:
            self.ops.add(update, residual, self.layer.scale)
        return residual
