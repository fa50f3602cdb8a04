"""The layer of a decoder that predicts one token further (loader/architectures/predictor.py). What it predicts is only a draft.

T tokens of all rows end to end; hidden: model width; V vocabulary.
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
from loader.model_shape import ModelShape


class Predictor(Generic[BatchT]):
    """Reads of each token the hidden state that the model ended with, and the embedding of the token that follows; its own hidden
    state then stands for the token after that one. To predict further it reads its own hidden state in the place of the model's.
    It has keys and values of its own. embedding: the model's."""

    def __init__(self, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights, embedding: Embedding) -> None:
        prefix = family.names.layer.format(shape.num_layers)
        of_norm = (ops, family, shape, weights)
        self.ops, self.embedding = ops, embedding
        self.token_norm, self.hidden_norm = Norm(*of_norm, prefix + TOKEN_NORM), Norm(*of_norm, prefix + HIDDEN_NORM)
        self.projection = weights.get(f"{prefix}{PROJECTION}.weight")
        self.layer = DecoderLayer(ops, family, shape, weights, shape.num_layers)
        self.norm = Norm(*of_norm, prefix + OUTPUT_NORM)

    def read(self, kept: Sequence[Tensor]) -> Tensor:
        """Returns the states [T, hidden] that it reads of the model: its hidden states, normed as its logits need them."""
        return kept[0]

    def __call__(self, states: Tensor, batch: BatchT) -> Tensor:
        """Stores keys and values at the positions of the batch, whose tokens are those that follow. Returns its own hidden states
        [T, hidden] after them."""
        embedded = self.embedding(batch.input_ids)
        read = torch.cat((self.token_norm(embedded), self.hidden_norm(states)), dim=1)
        residual = self.ops.linear(read, self.projection)
        update = self.layer(None, residual, batch)
        if update is not None:
            self.ops.add(update, residual, self.layer.scale)
        return residual
