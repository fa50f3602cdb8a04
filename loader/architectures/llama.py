"""Describes Llama 2, Llama 3.x and other models of the same architecture."""

from __future__ import annotations

from loader.architectures.decoder import Decoder

ARCHITECTURE = Decoder("LlamaForCausalLM", "llama", has_mlp_bias_key=True)
