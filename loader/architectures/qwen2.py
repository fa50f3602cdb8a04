"""Qwen2 and Qwen2.5 (dense): like Llama, with biases on queries, keys and values. Some checkpoints have windows from a given
layer on.
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder
from loader.architectures.windows import Windows, from_a_layer_on

ARCHITECTURE = Decoder(
    "Qwen2ForCausalLM",
    "qwen2",
    windows=Windows(from_a_layer_on, default_tokens=4096),
    attention_bias=True,
    output_bias=False,
)
