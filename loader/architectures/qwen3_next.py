"""Describes Qwen3-Next (80B-A3B): three of four layers have the gated delta rule (linear attention), the fourth has gated
attention. Each layer has a mixture of experts, and a shared expert for all tokens whose output is multiplied by a gate. Rotary
embedding (RoPE) applies to a quarter of each head's dimensions.

Multi-token-prediction layers are not read.
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder, TensorNames
from loader.architectures.delta import DeltaNames, Deltas
from loader.architectures.experts import ExpertNames, Experts
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = Decoder(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    names=TensorNames(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm", not_read="mtp."),
    rope=RopeRules(may_be_partial=True, partial=0.25),
    head_dim=256,
    intermediate_size=5632,
    norms_around_one=True,
    gated_attention=True,
    deltas=Deltas(names=DeltaNames(inputs=("linear_attn.in_proj_qkvz",), gates=("linear_attn.in_proj_ba",)), by_head=True),
    experts=Experts(
        num_experts=512,
        num_chosen=10,
        names=ExpertNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate"),
        size=512,
        shared_size=512,
        normalised_default=True,
        has_dense_layers=True,
    ),
)
