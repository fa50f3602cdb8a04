"""Describes Granite 3.x (dense): Llama with factors that scale embeddings, attention scores, the outputs of attention and MLP, and
logits.
"""

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
