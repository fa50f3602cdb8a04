"""The rules for `replicas`, which allows several copies of a model, each whole, on different devices."""

from __future__ import annotations

from typing import Any

from config.schema import ModelConfig

AUTO = "auto"  # as many as the current requests keep busy
MOST = 64


def check(value: Any) -> None:
    """Raises ValueError unless the value is "auto" or a number from 1 to 64."""
    if value != AUTO and not 1 <= value <= MOST:
        raise ValueError(f"must be from 1 to {MOST}, or {AUTO!r}")


def problem(settings: ModelConfig) -> str:
    """Returns why a model cannot have the number of replicas in its settings, or "" if it can."""
    if settings.replicas != 1 and settings.isolate:
        return "does not go with isolate = true: an isolated model has a part of one device"
    return ""


def number(settings: ModelConfig, num_places: int) -> int:
    """Returns the most replicas (whole copies) that the model may have, each on devices of its own; at least 1. num_places: the
    number of devices, or of groups of devices if it is split, on which it may be at once."""
    most = max(1, num_places)
    return most if settings.replicas == AUTO else min(int(settings.replicas), most)
