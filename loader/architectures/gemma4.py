"""Describes Gemma 4 (text): like Gemma 3, but norms multiply by weight instead of 1 + weight, values have norms too, and a factor
scales the residual after each layer. Layers with full attention have fewer and larger heads than layers with a sliding window;
rotary embedding (RoPE) applies to a quarter of each of these heads, and one projection may make both keys and values.

In E2B and E4B each layer has additional inputs (engine/layers/layer_inputs.py), and the last layers read the KV of earlier ones. In
the 26B model each layer has experts beside its MLP.
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
