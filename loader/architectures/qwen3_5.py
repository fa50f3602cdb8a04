"""Describes Qwen3.5 (text): three of four layers have the gated delta rule (linear attention), the fourth has gated attention.
Rotary embedding (RoPE) applies to a quarter of each head's dimensions. Its settings for positions within images are not used, since
only texts are served.

Multi-token-prediction layers are not read.
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder, TensorNames
from loader.architectures.delta import Deltas
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = Decoder(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    names=TensorNames(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm", not_read="mtp."),
    rope=RopeRules(may_be_partial=True, partial=0.25),
    head_dim=256,
    norms_around_one=True,
    gated_attention=True,
    deltas=Deltas(),
)
