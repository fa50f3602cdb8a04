"""Describes GLM-4.7-Flash (Glm4MoeLite): multi-head latent attention, and a mixture of experts like that of GLM-4.5. The first
layer has one MLP instead.

Of the multi-token-prediction layers after the last layer, at most the first is read (predictor.py).
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder
from loader.architectures.deepseek_v3 import EXPERT_NAMES
from loader.architectures.experts import ROUTED_NUM_KEYS, Experts, SigmoidRule
from loader.architectures.latent import Latents

ARCHITECTURE = Decoder(
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    rms_norm_eps=1e-5,
    predicting_layers=1,
    latents=Latents(query_rank=768, plain_dim=192, value_dim=256, interleaved_key="rope_interleave"),
    experts=Experts(
        num_experts=64,
        num_chosen=4,
        names=EXPERT_NAMES,
        num_keys=ROUTED_NUM_KEYS,
        size=1536,
        num_shared=1,
        normalised_default=True,
        sigmoid=SigmoidRule(factor=1.8),
        num_dense_first=1,
        has_layer_types=True,
        fixed=(("topk_method", "noaux_tc"),),
    ),
)
