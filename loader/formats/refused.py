"""Defines the value that says why a setting of a `quantization_config` is not served."""

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
    """Returns (key, reason) if `read` refuses a setting in a `quantization_config`; otherwise None. Implements
    WeightFormat.refuses. read: reads a format's settings from the configuration, or returns a Refused."""
    found = read(config)
    return found if isinstance(found, Refused) else None


def is_read_as(read: Callable[[Mapping[str, Any]], object], settings: object, config: Mapping[str, Any]) -> bool:
    """Returns whether `read` reads exactly the given settings from a `quantization_config`. Implements WeightFormat.recognises.
    read: reads a format's settings from the configuration."""
    return read(config) == settings
