"""Settings of a `quantization_config` that are not served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Refused(NamedTuple):
    """A setting that is not served. key: its key within `quantization_config`."""

    key: str
    why: str


def not_served(key: str, value: object, served: str) -> Refused:
    return Refused(key, f"{str(value)[:64]!r} is not served; served: {served}")


def refusal_of(read: Callable[[Mapping[str, Any]], object], config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns key and words of the refusal that read(config) returns; None if it does not refuse (implements
    WeightFormat.refuses)."""
    found = read(config)
    return found if isinstance(found, Refused) else None


def is_read_as(read: Callable[[Mapping[str, Any]], object], settings: object, config: Mapping[str, Any]) -> bool:
    """Returns whether read(config) returns these settings (implements WeightFormat.recognises)."""
    return read(config) == settings
