"""Describes Gemma 3 (text): Gemma 2 with norms of queries and keys instead of soft caps. Five of six layers have a sliding window
and frequencies of rotary embedding (RoPE) that differ from those of the sixth layer.
"""

from __future__ import annotations

from loader.architectures.decoder import GELU_TANH, Decoder, TensorNames
from loader.architectures.windows import Windows, all_but_every_nth
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = Decoder(
    "Gemma3ForCausalLM",
    "gemma3_text",
    names=TensorNames(
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        attended_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_output_norm="post_feedforward_layernorm",
    ),
    windows=Windows(all_but_every_nth(6, key="sliding_window_pattern"), default_tokens=4096),
    rope=RopeRules(theta=1e6, is_local=True),
    head_dim=256,
    tie_word_embeddings=True,
    query_scalar=256.0,
    logit_softcap=0.0,  # its configuration has attn_logit_softcapping, too, but its attention does not cap
    activation=GELU_TANH,
    activation_key="hidden_activation",
    norms_around_one=True,
    scales_embeddings=True,
)
