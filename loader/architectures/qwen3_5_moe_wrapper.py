"""Describes the checkpoints of Qwen3.5's mixtures of experts as they are published: the decoder beside an image encoder, which is
not read.
"""

from __future__ import annotations

from loader.architectures.qwen3_5_moe import ARCHITECTURE as TEXT
from loader.architectures.wrapper import Wrapper

ARCHITECTURE = Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", TEXT, others=("visual.", "model.visual."))
