"""Describes GLM-4-0414 and GLM-Z1, 9B and 32B (Glm4): GLM-4 with further norms, of the outputs of attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from loader.architectures import glm

ARCHITECTURE = replace(
    glm.ARCHITECTURE,
    name="Glm4ForCausalLM",
    model_type="glm4",
    names=replace(glm.NAMES, attended_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm"),
)
