"""Reads what a `quantization_config` says about matrices in FP8 (e4m3): the name under which their scales are stored, and how many
weights share a scale.

Five producers are known: fine-grained FP8 (`fp8`, as DeepSeek-V3 and Qwen3 have it, and AutoFP8's without blocks),
compressed-tensors (`float-quantized`), FBGEMM (`fbgemm_fp8`), NVIDIA's ModelOpt and AMD's Quark. In all of them a weight is its
code's value times its scale. Settings for activations and KV are ignored: the activations that are multiplied with the matrices
have the model's dtype. Sources: https://github.com/huggingface/transformers (utils/quantization_config.py, integrations),
https://github.com/vllm-project/compressed-tensors, https://github.com/vllm-project/vllm (model_executor/layers/quantization).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from loader.formats import modelopt
from loader.formats.compressed_tensors import first_other, read_groups
from loader.formats.refused import Refused, not_served

BLOCK = 128  # number of outputs, and of inputs, of a block of weights with one scale
MATRIX, OUTPUT, EACH_BLOCK = "matrix", "output", "block"
SCALE, SCALE_INV = "_scale", "_scale_inv"
_BLOCKS = [BLOCK, BLOCK]
_BLOCK_TEXTS = (_BLOCKS, f"{BLOCK}x{BLOCK}")


class Fp8Scales(NamedTuple):
    """The way in which a checkpoint stores the scales of its FP8 matrices. suffix: what follows a matrix's name in the name of its
    scales. unit: which weights share a scale: those of the whole matrix (MATRIX), of an output (OUTPUT), or of a block of 128 x 128
    weights (EACH_BLOCK)."""

    suffix: str
    unit: str


Found = Fp8Scales | Refused | None  # None: the configuration is not about FP8 matrices


def read(config: Mapping[str, Any]) -> Found:
    reader = _READERS.get(str(config.get("quant_method")))
    return None if reader is None else reader(config)


def _fine_grained(config: Mapping[str, Any]) -> Found:
    for key, served in (
        ("fmt", ("e4m3", "float8_e4m3fn")),
        ("activation_scheme", ("dynamic", "static")),
        ("expert_dtype", ("fp8",)),
    ):
        if config.get(key) is not None and config[key] not in served:
            return not_served(key, config[key], ", ".join(served))
    blocks = config.get("weight_block_size")
    if blocks is None:
        return Fp8Scales(SCALE, MATRIX)
    return Fp8Scales(SCALE_INV, EACH_BLOCK) if blocks == _BLOCKS else not_served("weight_block_size", blocks, str(_BLOCKS))


def _compressed(config: Mapping[str, Any]) -> Found:
    return read_groups(config, "float-quantized", _compressed_group)


def _compressed_group(key: str, weights: Mapping[str, Any]) -> Fp8Scales | Refused:
    if (refused := first_other(key, weights, {"num_bits": 8, "type": "float", "symmetric": True})) is not None:
        return refused
    strategy = weights.get("strategy")
    if strategy == "block" and weights.get("block_structure") not in _BLOCK_TEXTS:
        return not_served(f"{key}.block_structure", weights.get("block_structure"), str(_BLOCKS))
    units = {"tensor": MATRIX, "channel": OUTPUT, "block": EACH_BLOCK}
    if not isinstance(strategy, str) or strategy not in units:
        return not_served(f"{key}.strategy", strategy, ", ".join(units))
    return Fp8Scales(SCALE, units[strategy])


def _fbgemm(config: Mapping[str, Any]) -> Found:
    return Fp8Scales(SCALE, OUTPUT)


def _modelopt(config: Mapping[str, Any]) -> Found:
    algorithm = modelopt.algorithm_of(config)
    if isinstance(algorithm, Refused):
        return algorithm
    unit = {modelopt.FP8: MATRIX, modelopt.FP8_BY_OUTPUT: OUTPUT}.get(algorithm or "")
    return None if unit is None else Fp8Scales(SCALE, unit)


def _quark(config: Mapping[str, Any]) -> Found:
    found = _quark_matrices("global_quant_config", config.get("global_quant_config"))
    if isinstance(found, Refused):
        return found
    export = config.get("export")
    kind = export.get("weight_format", "real_quantized") if isinstance(export, dict) else "real_quantized"
    if kind != "real_quantized":
        return not_served("export.weight_format", kind, "real_quantized")
    for key in ("layer_quant_config", "layer_type_quant_config"):
        others = config.get(key) or {}
        for name, other in others.items() if isinstance(others, dict) else ():
            if _quark_matrices(f"{key}.{str(name)[:64]}", other) != found:
                return Refused(f"{key}.{str(name)[:64]}", "layers that are stored differently are not served")
    return found


def _quark_matrices(key: str, layers: object) -> Fp8Scales | Refused:
    weight = layers.get("weight") if isinstance(layers, dict) else None
    if not isinstance(weight, dict):
        return Refused(f"{key}.weight", "missing")
    if weight.get("dtype") != "fp8_e4m3":
        return not_served(f"{key}.weight.dtype", weight.get("dtype"), "fp8_e4m3")
    units = {"per_tensor": MATRIX, "per_channel": OUTPUT}
    scheme = weight.get("qscheme")
    if not isinstance(scheme, str) or scheme not in units or weight.get("ch_axis") not in (None, 0):
        return not_served(f"{key}.weight.qscheme", scheme, ", ".join(units))
    return Fp8Scales(SCALE, units[scheme])


_READERS: dict[str, Callable[[Mapping[str, Any]], Found]] = {
    "fp8": _fine_grained,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "quark": _quark,
}
