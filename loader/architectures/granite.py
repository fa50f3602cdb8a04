"""Granite 3.x (dense): Llama with factors of embeddings, scores, branches' outputs and logits."""

from __future__ import annotations

from loader.architectures.decoder import Decoder
from loader.architectures.factors import Factors

ARCHITECTURE = Decoder(
    "GraniteForCausalLM",
    "granite",
    has_mlp_bias_key=True,
    factors=Factors(
        embeddings="embedding_multiplier",
        branches="residual_multiplier",
        scores="attention_multiplier",
        logits_divisor="logits_scaling",
    ),
)
