"""Describes Phi-3 and Phi-4: Llama, but checkpoints store q, k and v as one tensor, and gate and up as one. In some models rotary
embedding (RoPE) applies only to a part of each head's dimensions, with frequencies scaled by LongRoPE.
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder, TensorNames
from loader.architectures.windows import Windows, every_layer
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = Decoder(
    "Phi3ForCausalLM",
    "phi3",
    names=TensorNames(queries_keys_values=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    windows=Windows(every_layer),
    rope=RopeRules(may_be_partial=True),
    rms_norm_eps=1e-5,
    attention_bias=False,
    output_bias=False,
)
