"""Settings of a `quantization_config` that are not served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Refused(NamedTuple):
    """A setting of a `quantization_config` that is not served. key: its key within the configuration. why: the reason, for
    messages."""

    key: str
    why: str


def not_served(key: str, value: object, served: str) -> Refused:
    return Refused(key, f"{str(value)[:64]!r} is not served; served: {served}")


def refusal_of(read: Callable[[Mapping[str, Any]], object], config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Implements WeightFormat.refuses by a function that reads settings: returns key and reason if read(config) returns a Refused,
    else None."""
    found = read(config)
    return found if isinstance(found, Refused) else None


def is_read_as(read: Callable[[Mapping[str, Any]], object], settings: object, config: Mapping[str, Any]) -> bool:
    """Implements WeightFormat.recognises by a function that reads settings: returns whether read(config) returns these settings."""
    return read(config) == settings
