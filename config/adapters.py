"""The settings that a LoRA adapter may have. For everything else, the settings of its base count."""

from __future__ import annotations

ALLOWED_FOR_ADAPTERS = ("aliases", "base")
