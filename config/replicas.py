"""Interprets and checks the setting `replicas`, which allows several copies of a model, each whole, on different devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from config import parallel
from config.schema import ModelConfig

AUTO = "auto"  # as many as the current requests keep busy
MOST = 64


def check(value: Any) -> None:
    """Checks a value of the setting `replicas`. Raises ValueError unless it is "auto" or a number from 1 to 64."""
    if value != AUTO and not 1 <= value <= MOST:
        raise ValueError(f"must be from 1 to {MOST}, or {AUTO!r}")


def problem(settings: ModelConfig, devices: Sequence[str]) -> str:
    """Returns why a model cannot have the number of replicas that its settings ask for, or "" if it can. devices: names of the
    node's devices, those of other hosts included. The model's files are not considered; `missing` reports if they allow fewer."""
    if settings.replicas != 1 and settings.isolate:
        return "does not go with isolate = true: an isolated model has a part of one device"
    most = max(1, parallel.num_places(settings, devices))
    if _asked(settings) <= most:
        return ""
    has = parallel.named_devices(settings, devices)
    return f"{settings.replicas} is too many: {has}, where there is room for {most}, each on devices of its own"


def missing(settings: ModelConfig, num_replicas: int) -> str:
    """Returns a text for operators which says that a model has fewer replicas than its settings ask for; "" if it has enough.
    num_replicas: how many replicas it may have on the devices that its files allow."""
    if _asked(settings) <= num_replicas:
        return ""
    are = "1 is" if num_replicas == 1 else f"{num_replicas} are"
    return f"of replicas = {settings.replicas}, only {are} possible on the devices that can run it"


def _asked(settings: ModelConfig) -> int:
    """Returns the least number of replicas with which the settings are satisfied; a model with fewer is reported to operators. It
    is 1 for "auto", with which any number is enough."""
    return 1 if settings.replicas == AUTO else int(settings.replicas)


def number(settings: ModelConfig, num_places: int) -> int:
    """Returns the most replicas (whole copies) that the model may have by its setting `replicas`, each on its own device or
    devices; at least 1. num_places: how many copies there can be on the devices that it may use, no two of them on the same
    device."""
    most = max(1, num_places)
    return most if settings.replicas == AUTO else min(int(settings.replicas), most)
