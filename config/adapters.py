"""The settings that a LoRA adapter may have in its table. Everything else follows the settings of its base model."""

from __future__ import annotations

ALLOWED_FOR_ADAPTERS = ("aliases", "base")
