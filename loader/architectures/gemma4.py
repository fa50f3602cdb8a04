"""Gemma 4 (text): like Gemma 3, but with norms that do not multiply by 1 + weight, norms of values and a factor of the residual
behind each layer. Layers without windows have fewer and larger heads, of which a quarter is rotated, and may have one projection
for keys and values. In E2B and E4B each layer has inputs of its own, and the last ones read the KV of earlier ones. The 26B model
has experts beside the MLP of each layer.
"""

from __future__ import annotations

from loader.architectures.decoder import GELU_TANH, Decoder, TensorNames
from loader.architectures.experts import BesideNames, ExpertNames, Experts
from loader.architectures.full_heads import FullHeads
from loader.architectures.windows import Windows, all_but_every_nth_and_the_last
from loader.shapes.model_shape import OUTPUT_MAJOR
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = Decoder(
    "Gemma4ForCausalLM",
    "gemma4_text",
    names=TensorNames(
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        attended_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_output_norm="post_feedforward_layernorm",
        layer_scalar="layer_scalar",
    ),
    windows=Windows(all_but_every_nth_and_the_last(6), default_tokens=512),
    rope=RopeRules(
        theta=1e6,
        is_local=True,
        may_be_proportional=True,
        scaling=(("rope_type", "proportional"), ("partial_rotary_factor", 0.25)),
    ),
    head_dim=256,
    tie_word_embeddings=True,
    query_scale=1.0,
    logit_softcap=0.0,
    activation=GELU_TANH,
    activation_key="hidden_activation",
    scales_embeddings=True,
    full_heads=FullHeads(512),
    value_norms=True,
    may_read_kv=True,
    layer_input_width=256,
    experts=Experts(
        num_experts=None,
        num_chosen=None,
        names=ExpertNames(
            router="router.proj",
            expert="experts.{}.",
            stacked_gate_up="experts.gate_up_proj",
            stacked_down="experts.down_proj",
        ),
        enabled_key="enable_moe_block",
        normalised=True,
        stack=OUTPUT_MAJOR,
        beside=BesideNames(),
        chosen_keys=("top_k_experts", "num_experts_per_tok"),
    ),
    causal_modes=("vision",),
)
