"""Describes Command R7B and Command A: Command R with a sliding window and rotary embedding (RoPE) on three of four layers. The
fourth layer has full attention and no RoPE.
"""

from __future__ import annotations

from dataclasses import replace

from loader.architectures import cohere
from loader.architectures.windows import Windows, all_but_every_nth
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = replace(
    cohere.ARCHITECTURE,
    name="Cohere2ForCausalLM",
    model_type="cohere2",
    windows=Windows(all_but_every_nth(4, "sliding_window_pattern"), default_tokens=4096),
    rope=RopeRules(only_windows=True, interleaved=True),
)
