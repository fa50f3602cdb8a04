"""Describes the checkpoints of Qwen3.5 as they are published: the decoder beside an image encoder, which is not read."""

from __future__ import annotations

from loader.architectures.qwen3_5 import ARCHITECTURE as TEXT
from loader.architectures.wrapper import Wrapper

ARCHITECTURE = Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5", TEXT, others=("visual.", "model.visual."))
