"""Maps the description of a family of models (loader/architectures) to the class in engine/models that runs models of that
family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from engine.contracts.ranks import Ranks
from engine.contracts.stages import Stages
from engine.layers.weights import Weights
from engine.models.bert import BertModel
from engine.models.decoder import DecoderModel
from engine.models.modernbert import ModernBertModel
from engine.ops.ops import BatchT, BatchT_contra, Ops
from loader.architectures.bert import Encoder as BertFamily
from loader.architectures.decoder import Decoder
from loader.architectures.modernbert import ModernEncoder
from loader.architectures.registry import architecture_of
from loader.architectures.wrapper import Wrapper
from loader.shapes.model_shape import ModelShape


class CausalLM(Protocol[BatchT_contra]):
    layers: Any  # in their order; `forward` iterates over them once

    def forward(self, batch: BatchT_contra, wanted: Tensor | None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    makes_logits: bool  # False for a stage of a pipeline before the last, and for a model that embeds
    passes_second: bool  # whether a stage passes on a second state with its residual (Stages.send)
    num_kept: int  # number of tensors in StepBatch.kept; 0: the model has no predictor

    def state_memory(self, num_tokens: int) -> Tensor: ...

    def read(self, kept: Sequence[Tensor]) -> Tensor: ...

    def predict(self, states: Tensor, batch: BatchT_contra) -> Tensor: ...

    def predicted_logits(self, states: Tensor) -> Tensor: ...


class Encoder(Protocol):
    def forward(self, input_ids: Tensor, lengths: Sequence[int], second_at: Sequence[int]) -> Tensor:
        """Returns the last hidden states [T, hidden] of R texts or pairs of texts. input_ids [T] int64: the tokens of all texts,
        one text after the other. lengths [R]: number of tokens of each text or pair. second_at [R]: for each, the index of the
        first token of the pair's second text; 0: it is a single text."""
        ...

    def scores(self, pooled: Tensor) -> Tensor:
        """Returns the scores [R] of R pairs of texts from their pooled vectors [R, hidden]. Called only for cross-encoders
        (ModelShape.scoring)."""
        ...


def build_model(
    ops: Ops[BatchT], shape: ModelShape, weights: Weights, ranks: Ranks | None = None, stages: Stages | None = None
) -> CausalLM[BatchT]:
    """Builds a decoder and returns it. ranks: the connection to the devices that compute the same layers (shape.split), by which
    partial results are added up; None: this device computes whole layers. stages: passes hidden states from one pipeline stage to
    the next; None: there is one stage. Raises TypeError for a model that is not a decoder; callers check shape.is_encoder first."""
    split = shape.split
    assert (split is None or split.size == 1) == (ranks is None)
    assert (split is None or not split.stage_ends) == (stages is None)
    family = architecture_of(shape)
    if isinstance(family, Decoder | Wrapper):
        return DecoderModel(ops, family.decoder_of(shape), shape, weights, ranks, stages)
    raise TypeError(f"{shape.architecture} is not built: nothing runs a {type(family).__name__}")


def build_encoder(shape: ModelShape, weights: Weights) -> Encoder:
    """Builds an encoder, a model that computes vectors of texts or scores of pairs of texts, and returns it. Raises TypeError if
    the model is not an encoder."""
    family = architecture_of(shape)
    if isinstance(family, BertFamily):
        return BertModel(family, shape, weights)
    if isinstance(family, ModernEncoder):
        return ModernBertModel(shape, weights)
    raise TypeError(f"{shape.architecture} is not built: no encoder runs a {type(family).__name__}")
