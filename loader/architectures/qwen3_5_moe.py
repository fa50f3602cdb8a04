"""Describes the mixtures of experts of Qwen3.5 (35B-A3B, 122B-A10B, 397B-A17B; text): Qwen3.5 (qwen3_5.py) with experts in every
layer, and a shared expert for all tokens whose output is multiplied by a gate.
"""

from __future__ import annotations

from dataclasses import replace

from loader.architectures.experts import ExpertNames, Experts
from loader.architectures.qwen3_5 import ARCHITECTURE as DENSE
from loader.shapes.model_shape import OUTPUT_MAJOR

ARCHITECTURE = replace(
    DENSE,
    name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    intermediate_key="moe_intermediate_size",
    intermediate_size=512,
    experts=Experts(
        num_experts=256,
        num_chosen=8,
        names=ExpertNames(
            shared="mlp.shared_expert.",
            shared_gate="mlp.shared_expert_gate",
            stacked_gate_up="mlp.experts.gate_up_proj",
            stacked_down="mlp.experts.down_proj",
        ),
        size=512,
        shared_size=512,
        normalised=True,
        stack=OUTPUT_MAJOR,
    ),
)
