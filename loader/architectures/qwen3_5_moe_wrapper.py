"""Qwen3.5's mixtures as they are published: the decoder beside an encoder of images."""

from __future__ import annotations

from loader.architectures.qwen3_5_moe import ARCHITECTURE as TEXT
from loader.architectures.wrapper import Wrapper

ARCHITECTURE = Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", TEXT, others=("visual.", "model.visual."))
