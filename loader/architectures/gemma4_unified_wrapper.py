"""Describes the checkpoints of Gemma 4 12B: the text model beside embeddings of images and sound, which are not read."""

from __future__ import annotations

from loader.architectures.gemma4_unified import ARCHITECTURE as TEXT
from loader.architectures.gemma4_wrapper import ENCODERS
from loader.architectures.wrapper import Wrapper

ARCHITECTURE = Wrapper("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", TEXT, others=ENCODERS)
