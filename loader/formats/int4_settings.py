"""Reads what a `quantization_config` says about matrices in INT4: how many inputs share a scale.

compressed-tensors (`pack-quantized`) is known. In it a weight is a whole number from -8 to 7 times its scale. What it says about
activations and KV is not used: products have activations of the model's dtype.
Source: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loader.formats.compressed_tensors import first_other, read_groups
from loader.formats.refused import Refused, not_served

GROUPS = (32, 64, 128)
WHOLE_ROW = 0  # in place of a number of inputs: all of an output share a scale
_ORDERS = (None, False, "weight", "static")  # of quantising the inputs; they stay at their places


def read(config: Mapping[str, Any]) -> int | Refused | None:
    """Returns how many inputs share a scale, one of GROUPS or WHOLE_ROW; None if the configuration is not about INT4."""
    if config.get("quant_method") != "compressed-tensors":
        return None
    return read_groups(config, "pack-quantized", _group)


def _group(key: str, weights: Mapping[str, Any]) -> int | Refused:
    if (refused := first_other(key, weights, {"num_bits": 4, "type": "int", "symmetric": True})) is not None:
        return refused
    if weights.get("actorder") not in _ORDERS:
        return not_served(f"{key}.actorder", weights["actorder"], ", ".join(map(str, _ORDERS)))
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel":
        return WHOLE_ROW
    if strategy != "group":
        return not_served(f"{key}.strategy", strategy, "group, channel")
    if size not in GROUPS:
        return not_served(f"{key}.group_size", size, ", ".join(map(str, GROUPS)))
    return int(size)
