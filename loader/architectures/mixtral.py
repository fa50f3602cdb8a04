"""Describes Mixtral 8x7B, 8x22B and relatives: Mistral with a mixture of experts in each layer."""

from __future__ import annotations

from loader.architectures.decoder import Decoder
from loader.architectures.experts import ExpertNames, Experts
from loader.architectures.windows import Windows, every_layer

ARCHITECTURE = Decoder(
    "MixtralForCausalLM",
    "mixtral",
    windows=Windows(every_layer),
    rms_norm_eps=1e-5,
    attention_bias=False,
    output_bias=False,
    experts=Experts(
        num_experts=8,
        num_chosen=2,
        names=ExpertNames(
            router="block_sparse_moe.gate",
            expert="block_sparse_moe.experts.{}.",
            gate_up=("w1", "w3"),
            down="w2",
        ),
        size_key="intermediate_size",
        normalised=True,
    ),
)
