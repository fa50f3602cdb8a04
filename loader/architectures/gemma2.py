"""Describes Gemma 2: norms before and after attention and MLP, soft caps of attention scores and logits, and a sliding window on
every second layer.
"""

from __future__ import annotations

from loader.architectures.decoder import GELU_TANH, Decoder, TensorNames
from loader.architectures.windows import Windows, all_but_every_nth

ARCHITECTURE = Decoder(
    "Gemma2ForCausalLM",
    "gemma2",
    names=TensorNames(
        attended_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_output_norm="post_feedforward_layernorm",
    ),
    windows=Windows(all_but_every_nth(2), default_tokens=4096),
    head_dim=256,
    tie_word_embeddings=True,
    query_scalar=256.0,
    attention_softcap=50.0,
    logit_softcap=30.0,
    activation=GELU_TANH,
    activation_key="hidden_activation",
    norms_around_one=True,
    scales_embeddings=True,
)
