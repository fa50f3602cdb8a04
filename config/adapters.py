"""The settings that a LoRA adapter may have. Everything else of it is as its base's settings say."""

from __future__ import annotations

ALLOWED_FOR_ADAPTERS = ("aliases", "base")
