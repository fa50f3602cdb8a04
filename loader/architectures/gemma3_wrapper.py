"""Describes the checkpoints of Gemma 3 from 4B on: Gemma 3 (text) beside an image encoder, which is not read. A key that their
text_config leaves out has the value that it has in Gemma 3 4B, the smallest of these models.
"""

from __future__ import annotations

from loader.architectures.gemma3 import ARCHITECTURE as TEXT
from loader.architectures.wrapper import Wrapper

ARCHITECTURE = Wrapper(
    "Gemma3ForConditionalGeneration",
    "gemma3",
    TEXT,
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
)
