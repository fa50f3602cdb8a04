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
    """Returns what WeightFormat.refuses returns for a configuration: key and reason if `read`, which reads the format's settings
    from it, returns a Refused; else None."""
    found = read(config)
    return found if isinstance(found, Refused) else None


def is_read_as(read: Callable[[Mapping[str, Any]], object], settings: object, config: Mapping[str, Any]) -> bool:
    """Returns what WeightFormat.recognises returns for a configuration: whether `read`, which reads a format's settings from it,
    returns these settings."""
    return read(config) == settings
