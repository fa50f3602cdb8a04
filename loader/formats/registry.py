"""Lists the weight formats."""

from __future__ import annotations

from loader.formats.int8 import INT8
from loader.formats.plain import PLAIN
from loader.formats.weight_format import WeightFormat

FORMATS = {one.name: one for one in (PLAIN, INT8)}


def asked_format(quantize: str | None) -> WeightFormat:
    """Returns the format that a value of the setting `quantize` asks for. Raises ValueError if there is none."""
    for one in FORMATS.values():
        if quantize in one.settings:
            return one
    raise ValueError(f"quantize: {quantize!r} is no weight format")
