"""Reads the `quantization_config` of an AWQ checkpoint: how many inputs share a scale, and whether zero points other than 8 are
stored.

Sources: https://arxiv.org/abs/2306.00978, https://github.com/casper-hansen/AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from loader.formats.gptq_settings import group_of, refused_setting
from loader.formats.refused import Refused, not_served


class Awq(NamedTuple):
    """The settings of an AWQ checkpoint. group_inputs: number of inputs that share a scale; 0 (WHOLE_ROW): all inputs of an output
    share one. symmetric: whether all zero points are 8."""

    group_inputs: int
    symmetric: bool


def read(config: Mapping[str, Any]) -> Awq | Refused | None:
    """Returns the AWQ settings in a `quantization_config`; a Refused (key and reason) for a setting that is not served; None if the
    configuration is not about AWQ."""
    if config.get("quant_method") != "awq":
        return None
    if (refused := refused_setting(config)) is not None:
        return refused
    key = "version" if config.get("version") else "format"
    if str(config.get(key) or "gemm").lower() != "gemm":
        return not_served(key, config[key], "gemm")
    if config.get("backend") == "llm-awq":
        return not_served("backend", config["backend"], "autoawq")
    if config.get("desc_act"):
        return not_served("desc_act", config["desc_act"], "False")
    has_zeros = config.get("zero_point", True)
    if not isinstance(has_zeros, bool):
        return not_served("zero_point", has_zeros, "True, False")
    return Awq(group_of(config), not has_zeros)
