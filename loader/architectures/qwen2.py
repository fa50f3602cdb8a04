"""Describes Qwen2 and Qwen2.5 (dense): Llama with biases of queries, keys and values. In some checkpoints the layers from a given
one on have a sliding window.
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
