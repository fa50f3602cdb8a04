"""Describes OLMo 3: OLMo 2 with a sliding window on three of four layers. Scaling of the rotary embedding (RoPE) applies only to
the layers with full attention.
"""

from __future__ import annotations

from dataclasses import replace

from loader.architectures.olmo2 import ARCHITECTURE as OLMO2
from loader.architectures.windows import Windows, all_but_every_nth
from loader.shapes.rope_config import RopeRules

ARCHITECTURE = replace(
    OLMO2,
    name="Olmo3ForCausalLM",
    model_type="olmo3",
    windows=Windows(all_but_every_nth(4), default_tokens=4096),
    rope=RopeRules(theta=500000.0, is_local=True, local_theta=None),
)
