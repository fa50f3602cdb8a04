"""Reads the `quantization_config` of a GPTQ checkpoint: how many inputs share a scale, whether and how zero points are stored, and
whether the inputs that share a scale are scattered over the matrix (`desc_act`) instead of lying side by side.

Sources: https://arxiv.org/abs/2210.17323, https://github.com/ModelCloud/GPTQModel, https://github.com/AutoGPTQ/AutoGPTQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from loader.formats.int4_settings import WHOLE_ROW
from loader.formats.left_plain import LEFT_OUT
from loader.formats.refused import Refused, not_served

GROUPS = (32, 64, 128, -1)  # -1: all inputs of an output share a scale
V1, V2 = "gptq", "gptq_v2"


class Gptq(NamedTuple):
    """The settings of a GPTQ checkpoint. group_inputs: number of inputs that share a scale; 0 (WHOLE_ROW): all inputs of an output
    share one. symmetric: whether all zero points are 8. is_v2: whether zero points are stored unchanged; otherwise they are stored
    minus 1. ordered: whether the inputs that share a scale may be scattered over the matrix (desc_act)."""

    group_inputs: int
    symmetric: bool
    is_v2: bool
    ordered: bool


def read(config: Mapping[str, Any]) -> Gptq | Refused | None:
    """Returns the GPTQ settings in a `quantization_config`; a Refused (key and reason) for a setting that is not served; None if
    the configuration is not about GPTQ."""
    if config.get("quant_method") != "gptq":
        return None
    if (refused := refused_setting(config)) is not None:
        return refused
    key = "checkpoint_format" if config.get("checkpoint_format") else "format"
    form = config.get(key) or V1
    if form not in (V1, V2):
        return not_served(key, form, f"{V1}, {V2}")
    if config.get("is_marlin_format"):
        return not_served("is_marlin_format", config["is_marlin_format"], "False")
    flags = {name: config.get(name, default) for name, default in (("sym", True), ("desc_act", False))}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            return not_served(name, flag, "True, False")
    group = group_of(config)
    return Gptq(group, flags["sym"], form == V2, flags["desc_act"] and group != WHOLE_ROW)


def refused_setting(config: Mapping[str, Any]) -> Refused | None:
    """Returns a Refused (key and reason) for the first setting of a GPTQ or AWQ `quantization_config` that is not served; None if
    there is none. Only the settings that GPTQ and AWQ have in common are checked."""
    if config.get("bits") != 4:
        return not_served("bits", config.get("bits"), "4")
    if config.get("group_size") not in GROUPS:
        return not_served("group_size", config.get("group_size"), ", ".join(map(str, GROUPS)))
    if config.get("pack_dtype") not in (None, "int32"):
        return not_served("pack_dtype", config["pack_dtype"], "int32")
    if config.get("lm_head"):
        return Refused("lm_head", "a quantised head is not served")
    if config.get("adapter"):
        return Refused("adapter", "is not served")
    rules = config.get("dynamic") or {}
    for pattern in rules if isinstance(rules, dict) else (str(rules),):
        if not pattern.startswith(LEFT_OUT):
            return Refused(f"dynamic.{pattern[:64]}", "layers with other settings are not served; served: layers left out (-:)")
    return None


def group_of(config: Mapping[str, Any]) -> int:
    return WHOLE_ROW if config["group_size"] == -1 else int(config["group_size"])
