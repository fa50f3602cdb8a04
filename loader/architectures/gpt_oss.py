"""Describes gpt-oss 20B and 120B: attention sinks, a sliding window on every second layer, and in each layer a mixture of experts
with biases and a clamped activation (SwiGLU).
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder, TensorNames
from loader.architectures.experts import ExpertNames, Experts
from loader.architectures.windows import Windows, all_but_every_nth
from loader.shapes.model_shape import ALTERNATING
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = Decoder(
    "GptOssForCausalLM",
    "gpt_oss",
    names=TensorNames(sinks="self_attn.sinks"),
    windows=Windows(all_but_every_nth(2), default_tokens=128),
    rope=RopeRules(
        theta=150000.0,
        scaling=(
            ("rope_type", "yarn"),
            ("factor", 32.0),
            ("beta_fast", 32.0),
            ("beta_slow", 1.0),
            ("truncate", False),
            ("original_max_position_embeddings", 4096),
        ),
    ),
    dtype="bfloat16",  # the published files do not say it
    head_dim=64,
    rms_norm_eps=1e-5,
    attention_bias_default=True,
    experts=Experts(
        num_experts=128,
        num_chosen=4,
        names=ExpertNames(
            router="mlp.router",
            stacked_gate_up="mlp.experts.gate_up_proj",
            stacked_down="mlp.experts.down_proj",
        ),
        size_key="intermediate_size",
        normalised=True,
        has_biases=True,
        stack=ALTERNATING,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
    ),
)
