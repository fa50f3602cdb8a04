"""DeepSeek-V2 and Coder-V2, and their Lite models: latent attention, and a mixture of experts with shared experts. The first layers
have one MLP. The larger models choose experts in groups, by the softmax of their scores in float32 (`topk_method:
"group_limited_greedy"`), and multiply their weights by a factor.
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
