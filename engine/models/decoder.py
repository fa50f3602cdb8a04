"""Decoders: Llama, Mixtral, Mistral, Qwen, Phi, Gemma, OLMo, DeepSeek, and what else `loader.architectures.decoder.Decoder` can
describe.

T tokens of all rows end to end; hidden: model width; V vocabulary. Weights are views of the model's one memory range.
"""

from __future__ import annotations

from typing import Generic

import torch
from torch import Tensor

from engine.layers.layer_inputs import LayerInputs
from engine.layers.norms import Norm
from engine.layers.weights import Weights
from engine.models.decoder_layer import DecoderLayer
from engine.models.predictor import Predictor
from engine.ops.ops import BatchT, Ops
from loader.architectures.decoder import Decoder
from loader.model_shape import ModelShape


class DecoderModel(Generic[BatchT]):
    def __init__(self, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights) -> None:
        self.ops = ops
        names = family.names
        self.embedding = weights.get(f"{names.embedding}.weight")
        self.embedding_scale = shape.embedding_scale
        if family.scales_embeddings:  # by a factor that is rounded as the embeddings are
            self.embedding_scale = torch.tensor(shape.hidden_size**0.5, dtype=self.embedding.dtype).item()
        self.inputs = LayerInputs(ops, family, shape, weights) if shape.layer_inputs is not None else None
        self.layers = [DecoderLayer(ops, family, shape, weights, layer) for layer in range(shape.num_layers)]
        self.norm = Norm(ops, family, shape, weights, names.final_norm)
        self.logit_scale, self.logit_softcap = shape.logit_scale, shape.logit_softcap
        self.head: Tensor | None = None  # of a model that makes vectors
        if not shape.pooling:
            self.head = self.embedding if shape.tie_word_embeddings else weights.get(f"{names.head}.weight")
        self.head_bias = weights.find(f"{names.head}.bias")
        self.predictor = Predictor(ops, family, shape, weights) if shape.predicts else None

    def forward(self, batch: BatchT, wanted: Tensor | None) -> Tensor:
        """Stores the batch's keys and values; returns the normed hidden states [N, hidden] of the tokens `wanted` ([N] int64; None:
        all of them)."""
        residual = self._embedded(batch)
        if self.inputs is not None:
            batch.layer_inputs = self.inputs(residual, batch)
        update: Tensor | None = None
        for layer in self.layers:
            update = layer(update, residual, batch)
        if wanted is not None:
            update, residual = None if update is None else update[wanted], residual[wanted]
        return self.norm(residual) if update is None else self.norm.of_sum(update, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [N, V] of hidden states [N, hidden]. Raises RuntimeError for a model that makes vectors."""
        if self.head is None:
            raise RuntimeError("the model makes vectors and has no head")
        logits = self.ops.scaled(self.ops.linear(hidden, self.head, self.head_bias), self.logit_scale)
        return self.ops.softcap(logits, self.logit_softcap)

    def predict(self, hidden: Tensor, batch: BatchT) -> Tensor:
        """Returns the predictor's hidden states [T, hidden] (Predictor). batch: its tokens are those that follow. Raises
        RuntimeError for a model without a predictor."""
        return self._its_predictor(self._embedded(batch), hidden, batch)

    def predicted_logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [N, V] of what `predict` returned [N, hidden]."""
        return self.logits(self._its_predictor.norm(hidden))

    @property
    def _its_predictor(self) -> Predictor[BatchT]:
        if self.predictor is None:
            raise RuntimeError("the model has no predictor")
        return self.predictor

    def _embedded(self, batch: BatchT) -> Tensor:
        return self.ops.embedding(batch.input_ids, self.embedding, self.embedding_scale)
