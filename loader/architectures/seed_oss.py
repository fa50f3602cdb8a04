"""Describes Seed-OSS: Llama with biases of queries, keys and values. A separate key of config.json says whether attention's output
has a bias.
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder

ARCHITECTURE = Decoder(
    "SeedOssForCausalLM",
    "seed_oss",
    head_dim=128,
    attention_bias_default=True,
    output_bias_key="attention_out_bias",
    has_mlp_bias_key=True,
)
