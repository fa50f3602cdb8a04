"""Describes GLM-4.5, GLM-4.5-Air and GLM-4.6 (Glm4Moe): a mixture of experts whose router's scores pass through a sigmoid, and a
shared expert for all tokens. The first layers have one MLP each instead. Rotary embedding (RoPE) applies to half of each head's
dimensions.

Of the multi-token-prediction layers after the last layer, at most the first is read (predictor.py).
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder, TensorNames
from loader.architectures.experts import ROUTED_NUM_KEYS, ExpertNames, Experts, SigmoidRule
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = Decoder(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    names=TensorNames(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
    rope=RopeRules(may_be_partial=True, partial=0.5),
    rms_norm_eps=1e-5,
    output_bias=False,
    head_norms_key="use_qk_norm",
    predicting_layers=1,
    experts=Experts(
        num_experts=128,
        num_chosen=8,
        names=ExpertNames(shared="mlp.shared_experts.", correction="mlp.gate.e_score_correction_bias"),
        num_keys=ROUTED_NUM_KEYS,
        size=1408,
        num_shared=1,
        normalised_default=True,
        sigmoid=SigmoidRule(),
        num_dense_first=1,
    ),
)
