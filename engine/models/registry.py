"""Which class runs which architecture (as config.json names it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from engine.layers.weights import Weights
from engine.models.bert import BertModel
from engine.models.gemma2 import Gemma2ForCausalLM
from engine.models.gemma3 import Gemma3ForCausalLM
from engine.models.llama import LlamaForCausalLM
from engine.models.mistral import MistralForCausalLM
from engine.models.phi3 import Phi3ForCausalLM
from engine.models.qwen2 import Qwen2ForCausalLM
from engine.models.qwen3 import Qwen3ForCausalLM
from engine.steps.forward_batch import ForwardBatch
from loader.hf_config import ModelShape


class CausalLM(Protocol):
    layers: Any  # in their order; `forward` iterates over them once

    def forward(self, batch: ForwardBatch, wanted: Tensor | None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Encoder(Protocol):
    def forward(self, input_ids: Tensor, lengths: Sequence[int]) -> Tensor: ...


MODELS: dict[str, Callable[[ModelShape, Weights], CausalLM]] = {
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
ENCODERS: dict[str, Callable[[ModelShape, Weights], Encoder]] = {"BertModel": BertModel}


def build_model(shape: ModelShape, weights: Weights) -> CausalLM:
    """loader.hf_config has refused all other architectures before."""
    return MODELS[shape.architecture](shape, weights)


def build_encoder(shape: ModelShape, weights: Weights) -> Encoder:
    return ENCODERS[shape.architecture](shape, weights)
