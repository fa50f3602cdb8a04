"""DeepSeek-V2-Lite and Coder-V2-Lite: latent attention, and a mixture of experts with experts for all tokens. The first layers
have one MLP.

The larger DeepSeek-V2 is refused: it chooses experts in groups, by the softmax of their scores.
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder
from loader.architectures.experts import ROUTED_NUM_KEYS, ExpertNames, Experts
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
        fixed=(
            ("topk_method", "greedy"),
            ("scoring_func", "softmax"),
            ("routed_scaling_factor", 1.0),
            ("moe_layer_freq", 1),
            ("mlp_bias", False),
        ),
    ),
)
