"""Describes the text model of Gemma 4 12B: Gemma 4 without additional layer inputs. The encoders in the same checkpoint are not
read.
"""

from __future__ import annotations

from dataclasses import replace

from loader.architectures.gemma4 import ARCHITECTURE as GEMMA4

ARCHITECTURE = replace(
    GEMMA4,
    name="Gemma4UnifiedForCausalLM",
    model_type="gemma4_unified_text",
    windows=replace(GEMMA4.windows, default_tokens=1024),
    layer_input_width=None,
    experts=None,
    fixed=(("enable_moe_block", False),),
)
