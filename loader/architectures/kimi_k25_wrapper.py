"""Kimi K2.5: Kimi K2, which is DeepSeek-V3, beside an encoder of images. Its experts are published in INT4."""

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
