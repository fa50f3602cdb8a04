"""Describes DeepSeek-V2 and Coder-V2, and their Lite models: multi-head latent attention, and a mixture of experts with shared
experts. The first layers have one MLP each instead of experts. In the larger models the router takes the softmax of its scores in
float32 and first chooses groups of experts, then experts within them (`topk_method: "group_limited_greedy"`); the weights of the
chosen experts are multiplied by a factor.
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder
from loader.architectures.experts import ROUTED_NUM_KEYS, ExpertNames, Experts, SigmoidRule
from loader.architectures.latent import Latents

ARCHITECTURE = Decoder(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    latents=Latents(query_rank=1536),
    experts=Experts(
        num_experts=64,
        num_chosen=6,
        names=ExpertNames(shared="mlp.shared_experts."),
        num_keys=ROUTED_NUM_KEYS,
        size=1407,
        num_shared=2,
        num_dense_first=0,
        in_groups=SigmoidRule(by_softmax=True),
        fixed=(
            ("topk_method", "greedy"),
            ("scoring_func", "softmax"),
            ("routed_scaling_factor", 1.0),
            ("moe_layer_freq", 1),
            ("mlp_bias", False),
        ),
    ),
)
