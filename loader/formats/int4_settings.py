"""Reads what a `quantization_config` of compressed-tensors (`pack-quantized`) says about matrices in INT4: how many inputs share a
scale, and whether there are zero points. Settings for activations and KV are ignored: the activations that are multiplied with the
matrices have the model's dtype. Source: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from loader.formats.compressed_tensors import first_other, read_groups
from loader.formats.refused import Refused, not_served

GROUPS = (32, 64, 128)
WHOLE_ROW = 0  # a value of group_inputs: all inputs of an output share a scale
_ORDERS = (None, False, "weight", "static")  # orders in which inputs were quantised that leave them at their places


class Int4(NamedTuple):
    """The settings of an INT4 checkpoint of compressed-tensors. group_inputs: number of inputs that share a scale, one of GROUPS; 0
    (WHOLE_ROW): all inputs of an output share one. symmetric: whether the checkpoint has no zero points."""

    group_inputs: int
    symmetric: bool


def read(config: Mapping[str, Any]) -> Int4 | Refused | None:
    """Returns the INT4 settings in a `quantization_config`; a Refused (key and reason) for a setting that is not served; None if
    the configuration is not about INT4 as compressed-tensors writes it."""
    if config.get("quant_method") != "compressed-tensors":
        return None
    return read_groups(config, "pack-quantized", _group)


def _group(key: str, weights: Mapping[str, Any]) -> Int4 | Refused:
    if (refused := first_other(key, weights, {"num_bits": 4, "type": "int"})) is not None:
        return refused
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        return not_served(f"{key}.symmetric", symmetric, "True, False")
    if weights.get("actorder") not in _ORDERS:
        return not_served(f"{key}.actorder", weights["actorder"], ", ".join(map(str, _ORDERS)))
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel":
        return Int4(WHOLE_ROW, symmetric)
    if strategy != "group":
        return not_served(f"{key}.strategy", strategy, "group, channel")
    if size not in GROUPS:
        return not_served(f"{key}.group_size", size, ", ".join(map(str, GROUPS)))
    return Int4(int(size), symmetric)
