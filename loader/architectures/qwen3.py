"""Describes Qwen3 (dense): Llama with RMS norms of each head's queries and keys before the rotary embedding (RoPE)."""

from __future__ import annotations

from loader.architectures.decoder import Decoder, TensorNames
from loader.architectures.windows import Windows, from_a_layer_on

ARCHITECTURE = Decoder(
    "Qwen3ForCausalLM",
    "qwen3",
    names=TensorNames(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
    windows=Windows(from_a_layer_on, default_tokens=4096),
    head_dim=128,
)
