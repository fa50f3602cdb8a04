"""Checkpoints with NVFP4 matrices as ModelOpt and compressed-tensors write them, made of plain ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.loader.compressed import config_of

GROUP = 16
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of a code below 8; the others are the same with the sign
LARGEST, LARGEST_SCALE = 6.0, 448.0
WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": GROUP, "dynamic": False}
ACTIVATIONS = WEIGHTS | {"dynamic": "local"}


def compressed(weights: dict[str, Any] | None = None, activations: dict[str, Any] | None = ACTIVATIONS) -> dict[str, Any]:
    """Returns the configuration that llm-compressor writes for NVFP4, with changes; without activations, for NVFP4A16."""
    return config_of("nvfp4-pack-quantized", WEIGHTS | (weights or {}), activations)


def modelopt(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Returns the configuration that ModelOpt writes into config.json, with changes."""
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP}
    group = {"input_activations": four_bits, "weights": four_bits | (weights or {}), "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "model.layers.*.mlp.gate"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.35.0"},
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    } | changes


def hf_quant_config(**changes: Any) -> dict[str, Any]:
    """Returns what ModelOpt writes into hf_quant_config.json, with changes of what it says about weights."""
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": GROUP, "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": quantization | changes}


def packed(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns bytes [N, K / 2] of two codes each, scales [N, K / 16] in e4m3, and the float32 that multiplies these."""
    whole = weight.float().abs().amax() / (LARGEST * LARGEST_SCALE)
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / LARGEST / whole).to(torch.float8_e4m3fn)
    scaled = groups / (scales.float() * whole).unsqueeze(-1).clamp(min=1e-30)
    table = torch.tensor(NUMBERS)
    codes = (scaled.abs().unsqueeze(-1) - table).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.flatten(1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scales, whole


def numbers_of(packed_bytes: Tensor) -> Tensor:
    """Returns the numbers [N, K] float32 of bytes [N, K / 2]: the first of two is in the low four bits."""
    table = torch.tensor((*NUMBERS, *(-number for number in NUMBERS)))
    return table[torch.stack((packed_bytes & 15, packed_bytes >> 4), dim=-1).flatten(1).long()]


def meant_by(packed_bytes: Tensor, scales: Tensor, whole: Tensor, divides: bool) -> Tensor:
    """Returns the weights [N, K] float32 of the definition: of ModelOpt number * (scale * weight_scale_2), of compressed-tensors
    number * (scale / weight_global_scale)."""
    of_groups = scales.float() / whole if divides else scales.float() * whole
    return (numbers_of(packed_bytes).unflatten(1, (-1, GROUP)) * of_groups.unsqueeze(-1)).flatten(1)


def quantize(
    source: Path, target: Path, config: dict[str, Any], plain: str = "-", only: str = "", beside: bool = False
) -> dict[str, Tensor]:
    """Writes the checkpoint in `source`, one file, to `target` with its layers' matrices in NVFP4, but for those with `plain` in
    their name or without `only` in it. config: a quantization_config, or (beside) hf_quant_config.json. Returns the weights that
    these stand for, float32."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    settings = json.loads((target / "config.json").read_text())
    if beside:
        (target / "hf_quant_config.json").write_text(json.dumps(config))
    else:
        (target / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    is_compressed = config.get("quant_method") == "compressed-tensors"
    tensors, meant = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")) or plain in name or only not in name:
            tensors[name] = tensor
            continue
        codes, scales, whole = packed(tensor)
        if is_compressed:
            divisor = 1 / whole
            own = {"packed": codes, "scale": scales, "global_scale": divisor.reshape(1)}
            tensors |= {f"{name}_{part}": value for part, value in own.items()}
            tensors[name.replace("weight", "input_global_scale")] = torch.ones(1)
            meant[name] = meant_by(codes, scales, divisor, divides=True)
        else:
            tensors |= {name: codes, f"{name}_scale": scales, f"{name}_scale_2": whole}
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5)
            meant[name] = meant_by(codes, scales, whole, divides=False)
    save_file(tensors, target / "model.safetensors")
    return meant
