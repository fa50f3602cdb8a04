"""Describes the checkpoints of Mistral Small 3.1 and 3.2: Mistral beside an image encoder, which is not read."""

from __future__ import annotations

from loader.architectures.mistral import ARCHITECTURE as TEXT
from loader.architectures.wrapper import Wrapper

ARCHITECTURE = Wrapper("Mistral3ForConditionalGeneration", "mistral3", TEXT)
