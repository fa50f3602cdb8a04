"""The rules for `replicas`, which allows several copies of a model, each whole, on different devices."""

from __future__ import annotations

from typing import Any

from config.schema import ModelConfig

AUTO = "auto"  # as many as the current requests keep busy
MOST = 64


def check(value: Any) -> None:
    """Raises ValueError for a value that makes no sense."""
    if value != AUTO and not 1 <= value <= MOST:
        raise ValueError(f"must be from 1 to {MOST}, or {AUTO!r}")


def problem(settings: ModelConfig) -> str:
    """Returns why a model cannot have the replicas for which its settings ask, or ""."""
    if settings.replicas != 1 and settings.isolate:
        return "does not go with isolate = true: an isolated model has a part of one device"
    return ""


def number(settings: ModelConfig, num_devices: int, num_ranks: int) -> int:
    """Returns how many replicas the model may have, each on devices of its own. num_devices: the number of devices where it may
    live. num_ranks: the number of devices over which each replica is split."""
    most = max(1, num_devices // num_ranks)
    return most if settings.replicas == AUTO else min(int(settings.replicas), most)
