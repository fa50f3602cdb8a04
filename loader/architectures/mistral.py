"""Describes Mistral 7B and relatives: Llama without biases, with a sliding window on every layer if config.json sets a length."""

from __future__ import annotations

from loader.architectures.decoder import Decoder
from loader.architectures.windows import Windows, every_layer

ARCHITECTURE = Decoder(
    "MistralForCausalLM",
    "mistral",
    windows=Windows(every_layer, default_tokens=4096),
    attention_bias=False,
    output_bias=False,
)
