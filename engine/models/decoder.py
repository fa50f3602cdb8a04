"""Runs decoders: Llama, Mixtral, Mistral, Qwen, Phi, Gemma, OLMo, DeepSeek, and all others that
`loader.architectures.decoder.Decoder` can describe.

Shapes: T tokens of all rows, end to end; hidden: model width; V vocabulary. Weights are views of the model's one memory range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from torch import Tensor

from engine.contracts.ranks import Ranks
from engine.contracts.stages import Stages
from engine.layers.embedding import Embedding
from engine.layers.layer_inputs import LayerInputs
from engine.layers.norms import Norm
from engine.layers.weights import Weights
from engine.models.decoder_layer import DecoderLayer
from engine.models.eagle import EagleDrafter
from engine.models.predictor import Predictor
from engine.ops.ops import BatchT, Ops, PackedMatrix
from loader.architectures.decoder import Decoder
from loader.shapes.model_shape import ModelShape


class DecoderModel(Generic[BatchT]):
    """A decoder, or one device's share of it.

    ranks: the connection to the devices that compute the same layers (tensor parallelism), by which partial results are added up;
    None: this device computes whole layers. stages: passes hidden states from one pipeline stage to the next; None: this device has
    all layers. Only the first stage has an embedding, and only the last one a final norm and a head."""

    def __init__(
        self,
        ops: Ops[BatchT],
        family: Decoder,
        shape: ModelShape,
        weights: Weights,
        ranks: Ranks | None = None,
        stages: Stages | None = None,
    ) -> None:
        self.ops, self.ranks, self.stages = ops, ranks, stages
        names, split = family.names, shape.split
        is_last = split is None or split.is_last_stage
        self.embedding = Embedding(ops, family, shape, weights, ranks) if split is None or split.is_first_stage else None
        self.inputs = LayerInputs(ops, family, shape, weights) if shape.layer_inputs is not None else None
        self.num_layers = shape.num_layers
        self.layers = [DecoderLayer(ops, family, shape, weights, layer, ranks) for layer in shape.own_layers]
        # A layer with a scalar adds its update itself. Layers' additional inputs are made from the embeddings.
        self.passes_embeddings = self.inputs is not None
        self.passes_second = self.passes_embeddings or not names.layer_scalar
        assert stages is None or names.layer_scalar or not self.passes_embeddings, "a stage passes on two states at most"
        self.norm = Norm(ops, family, shape, weights, names.final_norm) if is_last else None
        self.logit_scale, self.logit_softcap = shape.logit_scale, shape.logit_softcap
        self.head: Tensor | PackedMatrix | None = None  # None: the model embeds, or this stage computes no logits
        if is_last and not shape.pooling:
            self.head = weights.table(f"{names.embedding if shape.tie_word_embeddings else names.head}.weight")
        self.makes_logits = self.head is not None
        self.head_bias = weights.find(f"{names.head}.bias")
        self.predictor: Predictor[BatchT] | EagleDrafter[BatchT] | None = None
        self.kept_layers: tuple[int, ...] = ()
        if shape.eagle is not None:
            self.predictor = EagleDrafter(ops, shape, weights, self._own_embedding.weight)
            self.kept_layers = shape.eagle.read_layers
        elif shape.predicts:
            self.predictor = Predictor(ops, family, shape, weights, self._own_embedding)
        self.num_kept = len(self.kept_layers) or int(shape.predicts)

    def forward(self, batch: BatchT, wanted: Tensor | None) -> Tensor:
        """Computes a batch, stores its keys and values, and returns hidden states [N, hidden] after the final norm. wanted [N]
        int64: the indices of the tokens whose states are returned; None: all tokens.

        If batch.kept is not None, its num_kept tensors [T, hidden] are filled with the states that the model's predictor reads. A
        pipeline stage before the last one sends its states to the next stage; its return value then has no meaning."""
        residual, update, embedded = self._first_states(batch)
        if self.inputs is not None:
            batch.layer_inputs = self.inputs(residual if embedded is None else embedded, batch)
        for number, layer in enumerate(self.layers):
            if number in self.kept_layers:
                self._keep(number, update, residual, batch)
                update = None
            update = layer(update, residual, batch)
        if self.num_layers in self.kept_layers:
            self._keep(self.num_layers, update, residual, batch)
            update = None
        if self.norm is None:
            assert self.stages is not None
            if self.passes_embeddings and self.embedding is not None:
                embedded = self.embedding(batch.input_ids)  # again, because the layers have changed them in place
            self.stages.send(residual, update if embedded is None else embedded)
            return residual
        if batch.kept is not None and not self.kept_layers:
            normed = self._normed(update, residual)
            self.ops.copy(normed, batch.kept[0])
            return normed if wanted is None else normed[wanted]
        if wanted is not None:
            update, residual = None if update is None else update[wanted], residual[wanted]
        return self._normed(update, residual)

    def _first_states(self, batch: BatchT) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the inputs of this device's first layer, from the embedding or from the previous pipeline stage, each [T,
        hidden]: the residual; the update that is still to be added to it, or None; and the embeddings of the tokens if the previous
        stage sends them, else None."""
        if self.embedding is not None:
            return self.embedding(batch.input_ids), None, None
        assert self.stages is not None
        residual, second = self.stages.receive(len(batch.input_ids), self.passes_second)
        return (residual, None, second) if self.passes_embeddings else (residual, second, None)

    def _normed(self, update: Tensor | None, residual: Tensor) -> Tensor:
        assert self.norm is not None
        return self.norm(residual) if update is None else self.norm.of_sum(update, residual)

    def _keep(self, layer: int, update: Tensor | None, residual: Tensor, batch: BatchT) -> None:
        """Adds the update to the residual, in place. The sum is the hidden state that `layer` reads; copies it to the tensor for
        this layer in batch.kept, unless batch.kept is None."""
        if update is not None:
            self._normed(update, residual)  # only for the sum, which is one kernel this way
        if batch.kept is not None:
            self.ops.copy(residual, batch.kept[self.kept_layers.index(layer)])

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [N, V] of N hidden states [N, hidden]. Raises RuntimeError for an embedding model, and in a pipeline
        stage before the last one."""
        if self.head is None:
            raise RuntimeError("the model makes no logits")
        logits = self.ops.linear(hidden, self.head, self.head_bias)
        if self.ranks is not None:
            logits = self.ranks.gather(logits)
        return self.ops.softcap(self.ops.scaled(logits, self.logit_scale), self.logit_softcap)

    def read(self, kept: Sequence[Tensor]) -> Tensor:
        """Returns the states with which the predictor begins, [T, width of the predictor]. kept: the states that `forward` has put
        into batch.kept. Raises RuntimeError for a model without a predictor."""
        return self._its_predictor.read(kept)

    def state_memory(self, num_tokens: int) -> Tensor:
        """Returns new memory [num_tokens, hidden] for hidden states that `forward` keeps for the predictor."""
        weight = self._own_embedding.weight
        like = weight.body if isinstance(weight, PackedMatrix) else weight
        return like.new_empty(num_tokens, weight.shape[1], dtype=weight.dtype)

    def predict(self, states: Tensor, batch: BatchT) -> Tensor:
        """Runs the predictor on a batch and returns its states [T, width of the predictor]. In this batch, the input at position p
        must be the token at position p + 1 of the text. states: the result of `read`, or of an earlier call of `predict`. Raises
        RuntimeError for a model without a predictor."""
        return self._its_predictor(states, batch)

    def predicted_logits(self, states: Tensor) -> Tensor:
        """Returns the predictor's logits [N, V]. states: N of the states that `predict` has returned."""
        predictor = self._its_predictor
        return predictor.logits(states) if isinstance(predictor, EagleDrafter) else self.logits(predictor.norm(states))

    @property
    def _own_embedding(self) -> Embedding:
        if self.embedding is None:
            raise RuntimeError("the embedding is at another stage")
        return self.embedding

    @property
    def _its_predictor(self) -> Predictor[BatchT] | EagleDrafter[BatchT]:
        if self.predictor is None:
            raise RuntimeError("the model has no predictor")
        return self.predictor
