"""Describes the decoder of Llama 4 Scout and Maverick, a mixture of experts: each token passes through one routed expert and one
shared expert. In three of four layers a query attends to the positions of its own chunk, with rotary embedding (RoPE); in the
fourth it attends to all positions up to its own, without RoPE.
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder, TensorNames
from loader.architectures.experts import ExpertNames, Experts
from loader.architectures.windows import CHUNKED, Windows, where_rotated
from loader.shapes.model_shape import INPUT_MAJOR
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = Decoder(
    "Llama4ForCausalLM",
    "llama4_text",
    names=TensorNames(gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj"),
    windows=Windows(where_rotated, default_tokens=8192, key="attention_chunk_size", kind=CHUNKED),
    rope=RopeRules(theta=500000.0, only_windows=True, interleaved=True),
    rms_norm_eps=1e-5,
    head_dim=128,
    unit_norms_key="use_qk_norm",
    has_temperature=True,
    intermediate_key="intermediate_size_mlp",
    intermediate_size=16384,
    experts=Experts(
        num_experts=16,
        num_chosen=1,
        names=ExpertNames(
            router="feed_forward.router",
            expert="feed_forward.experts.{}.",
            shared="feed_forward.shared_expert.",
            stacked_gate_up="feed_forward.experts.gate_up_proj",
            stacked_down="feed_forward.experts.down_proj",
        ),
        size_key="intermediate_size",
        size=8192,
        num_shared=1,
        normalised=False,
        stack=INPUT_MAJOR,
        weighs_inputs=True,
        has_sparse_layers=True,
    ),
)
