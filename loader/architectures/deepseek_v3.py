"""Describes DeepSeek-V3, V3.1 and R1, and Kimi K2: multi-head latent attention, and a mixture of experts. The router's scores pass
through a sigmoid; it first chooses groups of experts, then experts within them. The first layers have one MLP each instead of
experts.

Of the multi-token-prediction layers after the last layer, at most the first is read (predictor.py).
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder
from loader.architectures.experts import ROUTED_NUM_KEYS, ExpertNames, Experts, SigmoidRule
from loader.architectures.latent import Latents

EXPERT_NAMES = ExpertNames(shared="mlp.shared_experts.", correction="mlp.gate.e_score_correction_bias")
ARCHITECTURE = Decoder(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    predicting_layers=1,
    latents=Latents(query_rank=1536, interleaved_key="rope_interleave"),
    experts=Experts(
        num_experts=256,
        num_chosen=8,
        names=EXPERT_NAMES,
        num_keys=ROUTED_NUM_KEYS,
        size=2048,
        num_shared=1,
        normalised_default=True,
        sigmoid=SigmoidRule(8, 4, 2.5),
        num_dense_first=3,
        fixed=(("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"), ("moe_layer_freq", 1)),
    ),
)
