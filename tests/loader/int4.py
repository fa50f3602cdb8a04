"""Checkpoints with INT4 matrices as compressed-tensors writes them (`pack-quantized`), made of plain ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.loader.compressed import config_of

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}


def compressed(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Returns the configuration that llm-compressor writes for W4A16, with changes."""
    return config_of("pack-quantized", WEIGHTS | (weights or {}), None) | changes


BY_OUTPUT = compressed({"strategy": "channel", "group_size": None})


def rounded(weight: Tensor, group_inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns numbers from -8 to 7 [N, K] int8 and scales [N, G] of dtype. group_inputs: 0: all of an output."""
    grouped = weight.float().unflatten(1, (-1, group_inputs or weight.shape[1]))
    scales = (grouped.abs().amax(-1) / 7.5).to(dtype)
    return (grouped / scales.float().unsqueeze(-1)).round().clamp(-8, 7).flatten(1).to(torch.int8), scales


def with_zeros(weight: Tensor, group_inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns numbers from -8 to 7 [N, K] int8, scales [N, G] of dtype, and zero points from -8 to 7 [N, G] int8."""
    grouped = weight.float().unflatten(1, (-1, group_inputs or weight.shape[1]))
    scales = ((grouped.amax(-1) - grouped.amin(-1)) / 15).to(dtype)
    zeros = (-8 - grouped.amin(-1) / scales.float()).round().clamp(-8, 7)
    zeros[0], zeros[1] = -8, 7
    numbers = (grouped / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(-8, 7)
    return numbers.flatten(1).to(torch.int8), scales, zeros.to(torch.int8)


def packed(numbers: Tensor) -> Tensor:
    """Returns numbers [N, K] as words [N, K / 8] int32: each plus 8, the first of eight in the lowest bits."""
    codes = (numbers.long() + 8).unflatten(1, (-1, 8))
    words = (codes << torch.arange(0, 32, 4)).sum(-1)
    return words.to(torch.int32)  # the highest bit becomes the sign


def quantize(
    source: Path, target: Path, config: dict[str, Any], plain: str = "-", dtype: torch.dtype = torch.bfloat16, only: str = ""
) -> dict[str, Tensor]:
    """Writes the checkpoint in `source`, one file, to `target` with its layers' matrices in INT4, but for those with `plain` in
    their name or without `only` in it. Returns the weights that these stand for, float32. dtype: that of the scales."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    settings = json.loads((target / "config.json").read_text())
    settings["quantization_config"] = config
    (target / "config.json").write_text(json.dumps(settings))
    group_inputs = config["config_groups"]["group_0"]["weights"]["group_size"] or 0
    tensors, meant = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if (
            not name.endswith(("_proj.weight", "_proj_with_mqa.weight", "fc1.weight", "fc2.weight", "dense.weight"))
            or plain in name
            or only not in name
        ):
            tensors[name] = tensor
            continue
        if config["config_groups"]["group_0"]["weights"]["symmetric"]:
            numbers, scales = rounded(tensor, group_inputs, dtype)
            zeros = torch.zeros(scales.shape)
        else:
            numbers, scales, zeros = with_zeros(tensor, group_inputs, dtype)
            tensors[f"{name}_zero_point"] = packed(zeros.t()).t().contiguous()
        differences = numbers.float().unflatten(1, (scales.shape[1], -1)) - zeros.float().unsqueeze(-1)
        meant[name] = (differences * scales.float().unsqueeze(-1)).flatten(1)
        tensors |= {f"{name}_packed": packed(numbers), f"{name}_scale": scales, f"{name}_shape": torch.tensor(tensor.shape)}
    save_file(tensors, target / "model.safetensors")
    return meant


def wrap_in_kimi_k25(folder: Path, text_type: str) -> None:
    """Rewrites the checkpoint of a DeepSeek-V3 in `folder`, one file, as that of a Kimi K2.5 around it, with tensors of an encoder.
    text_type: the model type of the text model."""
    text = json.loads((folder / "config.json").read_text()) | {"model_type": text_type}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": text["dtype"]}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": text}))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {name: torch.zeros(4) for name in ("vision_tower.patch_embed.proj.bias", "mm_projector.pre_norm.weight")}
    save_file(tensors, folder / "model.safetensors")
