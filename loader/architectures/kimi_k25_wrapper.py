"""Describes the checkpoints of Kimi K2.5: Kimi K2, whose architecture is DeepSeek-V3's, beside an image encoder, which is not read.
The experts are published in INT4.
"""

from __future__ import annotations

from loader.architectures.deepseek_v3 import ARCHITECTURE as TEXT
from loader.architectures.wrapper import Wrapper

ARCHITECTURE = Wrapper(
    "KimiK25ForConditionalGeneration",
    "kimi_k25",
    TEXT,
    also=("kimi_k2",),
    others=("vision_tower.", "mm_projector."),
)
