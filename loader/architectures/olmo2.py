"""Describes OLMo 2: Llama with norms after attention and MLP instead of before them. A norm of queries or keys is over all heads of
a token at once.
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder, TensorNames

ARCHITECTURE = Decoder(
    "Olmo2ForCausalLM",
    "olmo2",
    names=TensorNames(
        attention_norm="",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        attended_norm="post_attention_layernorm",
        mlp_norm="",
        mlp_output_norm="post_feedforward_layernorm",
    ),
    whole_width_norms=True,
    rms_norm_eps=1e-5,
)
