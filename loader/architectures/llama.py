"""Llama 2, 3.x and relatives."""

from __future__ import annotations

from loader.architectures.decoder import Decoder

ARCHITECTURE = Decoder("LlamaForCausalLM", "llama", has_mlp_bias_key=True)
