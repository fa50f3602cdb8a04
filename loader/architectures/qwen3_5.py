"""Qwen3.5 (text): three of four layers of the gated delta rule, the fourth with gated attention. A quarter of each head is rotated.
The rotary embedding can also take positions within images, which texts do not have.

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
