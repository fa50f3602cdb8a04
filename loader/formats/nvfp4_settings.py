"""Reads from a `quantization_config` under which names a checkpoint stores the tensors of its NVFP4 matrices.

Two producers are known: NVIDIA's ModelOpt (`NVFP4`), and compressed-tensors (`nvfp4-pack-quantized`, with or without quantised
activations). Their settings for activations and KV are ignored: the activations that are multiplied with the matrices have the
model's dtype. Sources: https://github.com/NVIDIA/Model-Optimizer, https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from loader.formats import modelopt
from loader.formats.compressed_tensors import first_other, read_groups
from loader.formats.refused import Refused

GROUP = 16  # inputs that share a scale
_NUMBERS: dict[str, object] = {"num_bits": 4, "type": "float", "group_size": GROUP}


class Nvfp4(NamedTuple):
    """The names of the tensors in which a producer stores an NVFP4 matrix, as suffixes that follow the matrix's name without
    `.weight`. numbers: the four-bit numbers. scales: the scales, each for 16 inputs of an output. whole: the factor of the whole
    matrix. divides: whether the scales are divided by this factor; if not, they are multiplied by it."""

    numbers: str
    scales: str
    whole: str
    divides: bool

    def of(self, matrix: str, part: str) -> str:
        """Returns the name of the tensor `part` of a matrix. matrix: the matrix's name with `.weight`. part: the tensor's
        suffix."""
        return matrix.removesuffix(".weight") + part


MODELOPT = Nvfp4(".weight", ".weight_scale", ".weight_scale_2", divides=False)
COMPRESSED = Nvfp4(".weight_packed", ".weight_scale", ".weight_global_scale", divides=True)


def read(config: Mapping[str, Any]) -> Nvfp4 | Refused | None:
    """Returns the names of the tensors of an NVFP4 checkpoint, which follow from its `quantization_config`; a Refused (key and
    reason) for a setting that is not served; None if the configuration is not about NVFP4."""
    if config.get("quant_method") == "compressed-tensors":
        return read_groups(config, "nvfp4-pack-quantized", _compressed_group)
    algorithm = modelopt.algorithm_of(config)
    if isinstance(algorithm, Refused):
        return algorithm
    return _modelopt(config) if algorithm in (modelopt.NVFP4, modelopt.NVFP4_WEIGHTS) else None


def _compressed_group(key: str, weights: Mapping[str, Any]) -> Nvfp4 | Refused:
    served = _NUMBERS | {"symmetric": True, "strategy": "tensor_group"}
    return first_other(key, weights, served) or COMPRESSED


def _modelopt(config: Mapping[str, Any]) -> Nvfp4 | Refused:
    """Checks the settings of NVFP4 in a configuration that ModelOpt wrote. Returns the names of the tensors of a matrix, or a
    Refused (key and reason) for a setting that is not served. The number of inputs that share a scale may be given by `group_size`
    or, in config.json, for each group of modules."""
    if config.get("group_size") is not None and (refused := first_other("", config, {"group_size": GROUP})) is not None:
        return refused
    groups = config.get("config_groups") or {}
    for name, group in groups.items() if isinstance(groups, dict) else ():
        key, weights = f"config_groups.{str(name)[:64]}.weights", group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            return Refused(key, "missing")
        if (refused := first_other(key, weights, _NUMBERS)) is not None:
            return refused
    return MODELOPT
