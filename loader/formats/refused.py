"""Settings of a `quantization_config` that are not served."""

from __future__ import annotations

from typing import NamedTuple


class Refused(NamedTuple):
    """A setting that is not served. key: below `quantization_config`."""

    key: str
    why: str


def not_served(key: str, value: object, served: str) -> Refused:
    return Refused(key, f"{str(value)[:64]!r} is not served; served: {served}")
