"""Describes the checkpoints of Llama 4 as they are published: the decoder beside an image encoder, which is not read."""

from __future__ import annotations

from loader.architectures.llama4 import ARCHITECTURE as TEXT
from loader.architectures.wrapper import Wrapper

ARCHITECTURE = Wrapper(
    "Llama4ForConditionalGeneration",
    "llama4",
    TEXT,
    others=("vision_model.", "multi_modal_projector.", "model.vision_model.", "model.multi_modal_projector."),
)
