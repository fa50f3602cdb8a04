"""Describes SmolLM3: Llama, in which the last of every four layers has no rotary embedding (NoPE)."""

from __future__ import annotations

from loader.architectures.decoder import Decoder
from loader.architectures.windows import Windows, where_unrotated_if_asked
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = Decoder(
    "SmolLM3ForCausalLM",
    "smollm3",
    windows=Windows(where_unrotated_if_asked),
    rope=RopeRules(theta=2000000.0, only_listed=True),
    tie_word_embeddings=True,
    has_mlp_bias_key=True,
)
