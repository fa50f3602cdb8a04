"""The layer of a decoder that predicts one token further (loader/architectures/predictor.py). What it predicts is only a draft.

T tokens of all rows end to end; hidden: model width; V vocabulary.
"""

from __future__ import annotations

from typing import Generic

import torch
from torch import Tensor

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
    It has keys and values of its own."""

    def __init__(self, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights) -> None:
        prefix = family.names.layer.format(shape.num_layers)
        of_norm = (ops, family, shape, weights)
        self.ops = ops
        self.token_norm, self.hidden_norm = Norm(*of_norm, prefix + TOKEN_NORM), Norm(*of_norm, prefix + HIDDEN_NORM)
        self.projection = weights.get(f"{prefix}{PROJECTION}.weight")
        self.layer = DecoderLayer(ops, family, shape, weights, shape.num_layers)
        self.norm = Norm(*of_norm, prefix + OUTPUT_NORM)

    def __call__(self, embedded: Tensor, hidden: Tensor, batch: BatchT) -> Tensor:
        """Stores keys and values at the positions of the batch, and returns hidden states [T, hidden]; their norms are what logits
        are made of. embedded [T, hidden]: of the tokens that follow. hidden [T, hidden]: of the tokens themselves, normed as the
        model's logits need it, or what this returned before."""
        read = torch.cat((self.token_norm(embedded), self.hidden_norm(hidden)), dim=1)
        residual = self.ops.linear(read, self.projection)
        update = self.layer(None, residual, batch)
        if update is not None:
            self.ops.add(update, residual, self.layer.scale)
        return residual
