"""Describes the mixtures of experts of Qwen3 (30B-A3B, 235B-A22B, Coder): Qwen3's attention, and experts in each layer."""

from __future__ import annotations

from loader.architectures.decoder import Decoder, TensorNames
from loader.architectures.experts import Experts
from loader.architectures.windows import Windows, every_layer_if_asked

ARCHITECTURE = Decoder(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    names=TensorNames(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
    windows=Windows(every_layer_if_asked, default_tokens=4096),
    experts=Experts(num_experts=128, num_chosen=8, size=768, has_dense_layers=True),
)
