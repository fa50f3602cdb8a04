"""Mistral 7B and relatives: Llama without biases, with a window on every layer where the checkpoint sets `sliding_window`."""

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
