"""Describes Phi-1, Phi-1.5 and Phi-2: attention and the MLP read the output of the same LayerNorm, the MLP has no gate, and all
matrices have biases. Rotary embedding (RoPE) applies to a part of each head's dimensions.
"""

from __future__ import annotations

from loader.architectures.decoder import GELU_NEW, Decoder, TensorNames
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = Decoder(
    "PhiForCausalLM",
    "phi",
    names=TensorNames(
        attention_output="self_attn.dense",
        mlp_norm="",
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
        final_norm="model.final_layernorm",
    ),
    rope=RopeRules(may_be_partial=True, partial=0.5),
    norm_eps_key="layer_norm_eps",
    rms_norm_eps=1e-5,
    attention_bias=True,
    mlp_bias=True,
    head_bias=True,
    activation=GELU_NEW,
    has_layer_norms=True,
    norm_bias=True,
    parallel_branches=True,
    fixed=(("qk_layernorm", False),),
)
