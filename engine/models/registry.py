"""Which class runs which architecture (as config.json names it)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.forward_batch import ForwardBatch
from engine.layers.weights import Weights
from engine.models.llama import LlamaForCausalLM
from engine.models.qwen3 import Qwen3ForCausalLM
from loader.hf_config import ModelShape


class CausalLM(Protocol):
    def forward(self, batch: ForwardBatch, wanted: Tensor | None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def build_model(shape: ModelShape, weights: Weights) -> CausalLM:
    """loader.hf_config.ARCHITECTURES has refused all others before."""
    match shape.architecture:
        case "LlamaForCausalLM":
            return LlamaForCausalLM(shape, weights)
        case "Qwen3ForCausalLM":
            return Qwen3ForCausalLM(shape, weights)
    raise KeyError(f"architecture {shape.architecture}")
