"""Settings of a `quantization_config` that are not served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Refused(NamedTuple):
    """A setting that is not served. key: below `quantization_config`."""

    key: str
    why: str


def not_served(key: str, value: object, served: str) -> Refused:
    return Refused(key, f"{str(value)[:64]!r} is not served; served: {served}")


def refusal_of(read: Callable[[Mapping[str, Any]], object], config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the refusal that read(config) gives; None if it gives none (WeightFormat.refuses)."""
    found = read(config)
    return found if isinstance(found, Refused) else None


def is_read_as(read: Callable[[Mapping[str, Any]], object], settings: object, config: Mapping[str, Any]) -> bool:
    """Returns whether read(config) gives these settings (WeightFormat.recognises)."""
    return read(config) == settings
