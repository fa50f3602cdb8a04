"""Describes Qwen1.5-MoE and Qwen2-MoE: Qwen2 with a mixture of experts, and a shared expert for all tokens whose output is
multiplied by a gate.
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder
from loader.architectures.experts import ExpertNames, Experts
from loader.architectures.windows import Windows, every_second_up_to_a_layer

ARCHITECTURE = Decoder(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    windows=Windows(every_second_up_to_a_layer, default_tokens=4096),
    attention_bias_key="qkv_bias",
    attention_bias_default=True,
    output_bias=False,
    experts=Experts(
        num_experts=60,
        num_chosen=4,
        names=ExpertNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate"),
        size=1408,
        shared_size=5632,
        has_dense_layers=True,
    ),
)
