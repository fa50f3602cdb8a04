"""Describes Command R: attention and the MLP read the output of the same LayerNorm, which has no bias, and a factor scales the
logits. Rotary embedding (RoPE) pairs neighbouring dimensions. Command R+ is not supported: it has norms of queries and keys in
which each head has weights of its own.
"""

from __future__ import annotations

from loader.architectures.decoder import Decoder, TensorNames
from loader.architectures.factors import Factors
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = Decoder(
    "CohereForCausalLM",
    "cohere",
    names=TensorNames(mlp_norm=""),
    rope=RopeRules(theta=500000.0, interleaved=True),
    norm_eps_key="layer_norm_eps",
    rms_norm_eps=1e-5,
    has_layer_norms=True,
    parallel_branches=True,
    tie_word_embeddings=True,
    factors=Factors(logits="logit_scale", logits_default=0.0625),
    fixed=(("use_qk_norm", False), ("use_parallel_block", True), ("use_gated_activation", True), ("rotary_pct", 1.0)),
)
