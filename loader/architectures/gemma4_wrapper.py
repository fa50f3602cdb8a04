"""Describes the checkpoints of Gemma 4: Gemma 4 (text) beside encoders of images and sound, which are not read."""

from __future__ import annotations

from loader.architectures.gemma4 import ARCHITECTURE as TEXT
from loader.architectures.wrapper import Wrapper

_PARTS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
ENCODERS = tuple(f"{model}{part}." for model in ("", "model.") for part in _PARTS)

ARCHITECTURE = Wrapper("Gemma4ForConditionalGeneration", "gemma4", TEXT, others=ENCODERS)
