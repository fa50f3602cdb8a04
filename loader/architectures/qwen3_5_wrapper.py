"""Qwen3.5 as it is published: the decoder beside an encoder of images."""

from __future__ import annotations

from loader.architectures.qwen3_5 import ARCHITECTURE as TEXT
from loader.architectures.wrapper import Wrapper

ARCHITECTURE = Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5", TEXT, others=("visual.", "model.visual."))
