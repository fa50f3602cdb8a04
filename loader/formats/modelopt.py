"""Reads how NVIDIA's ModelOpt describes the quantisation of a checkpoint. Its description is the `quantization_config` of
config.json or, in checkpoints of earlier versions, the file hf_quant_config.json. Source: https://github.com/NVIDIA/Model-Optimizer
(modelopt/torch/export).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loader.formats.refused import Refused, not_served
from loader.shapes.config_fields import Fields, json_fields

QUANT_CONFIG_NAME = "hf_quant_config.json"
QUANT_CONFIG_KEY = "quantization"
EXCLUDED = "exclude_modules"  # the key in hf_quant_config.json; config.json calls the same list `ignore`
FP8, FP8_BY_OUTPUT, NVFP4, NVFP4_WEIGHTS = "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4"
_METHODS = {"modelopt": (FP8, FP8_BY_OUTPUT, NVFP4, NVFP4_WEIGHTS), "modelopt_fp4": (NVFP4, NVFP4_WEIGHTS)}


def algorithm_of(config: Mapping[str, Any]) -> str | Refused | None:
    """Returns the quantisation algorithm that ModelOpt's `quantization_config` names, such as "NVFP4"; a Refused (key and reason)
    if it is not served; None if ModelOpt did not write the configuration."""
    served = _METHODS.get(str(config.get("quant_method")))
    if served is None:
        return None
    algorithm = config.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in served:
        return not_served("quant_algo", algorithm, ", ".join(served))
    return algorithm


def quant_config(text: bytes) -> Fields:
    """Returns hf_quant_config.json as an object that has, under the key QUANT_CONFIG_KEY, what other checkpoints have as
    `quantization_config`. The object is empty if no matrix is quantised, as in checkpoints in which only the KV is. text: the
    file's content. Raises CheckpointError if it is not valid."""
    fields = json_fields(text, QUANT_CONFIG_NAME)
    own = fields.mapping(QUANT_CONFIG_KEY)
    if own is None:
        raise fields.fail(QUANT_CONFIG_KEY, "missing")
    values = {QUANT_CONFIG_KEY: {"quant_method": "modelopt"} | own.values} if own.has("quant_algo") else {}
    return Fields(values, QUANT_CONFIG_NAME)
