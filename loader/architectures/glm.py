"""Describes GLM-4 9B as published for transformers (Glm): checkpoints store q, k and v as three tensors, and gate and up as one.
Rotary embedding (RoPE) applies to half of each head's dimensions, in pairs of neighbours.
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder, TensorNames
from loader.shapes.rope_config import RopeRules

NAMES = TensorNames(gate_up=("mlp.gate_up_proj",))
ROPE = RopeRules(may_be_partial=True, partial=0.5, interleaved=True)
ARCHITECTURE = Decoder(
    "GlmForCausalLM",
    "glm",
    names=NAMES,
    rope=ROPE,
    head_dim=128,
    rms_norm_eps=1.5625e-7,
    attention_bias_default=True,
    output_bias=False,
)
