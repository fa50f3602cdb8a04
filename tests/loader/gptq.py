"""Checkpoints with INT4 matrices as GPTQ and AWQ write them, made of plain ones, and the weights that these stand for.

The weights follow from what is stored by the formats' own rules: GPTQ's (https://github.com/ModelCloud/GPTQModel) and AutoAWQ's
(https://github.com/casper-hansen/AutoAWQ, `gemm`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FIRST_OF = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # whose inputs are the same


def gptq(**changes: Any) -> dict[str, Any]:
    """Returns the configuration that GPTQModel writes, with changes."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
    return config | {"checkpoint_format": "gptq", "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:4.0.0"]}} | changes


def awq(**changes: Any) -> dict[str, Any]:
    """Returns the configuration that AutoAWQ writes, with changes."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return config | {"modules_to_not_convert": None} | changes


def packed(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Returns numbers [R, 8 C] from 0 to 15 as words [R, C] int32: number order[n] of eight in four bits from 4 n on."""
    words = sum(numbers.long().unflatten(1, (-1, 8))[..., number] << 4 * n for n, number in enumerate(order))
    assert isinstance(words, Tensor)
    return words.to(torch.int32).contiguous()  # the highest bit becomes the sign


def unpacked(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Returns the numbers [R, 8 C] of words [R, C]."""
    places = [words >> 4 * order.index(number) & 15 for number in range(8)]
    return torch.stack(places, dim=-1).flatten(1)


def dequantised(tensors: dict[str, Tensor], name: str, config: dict[str, Any]) -> Tensor:
    """Returns the weights [N, K] float32 of a stored matrix NAME."""
    words, scales, zeros = (tensors[f"{name}.{part}"] for part in ("qweight", "scales", "qzeros"))
    if config["quant_method"] == "awq":
        numbers, zeros = unpacked(words, AWQ_ORDER), unpacked(zeros, AWQ_ORDER)
        groups = torch.arange(len(numbers)) // (len(numbers) // len(scales))
    else:
        numbers, zeros = unpacked(words.t()).t(), unpacked(zeros)
        zeros += int(config["checkpoint_format"] == "gptq")  # v1 stores one less
        groups = tensors[f"{name}.g_idx"].long()
    return ((numbers - zeros[groups]) * scales.float()[groups]).t().contiguous()


def stored(weight: Tensor, name: str, config: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns what is stored of a matrix NAME with these weights [N, K]. dtype: that of the scales."""
    num_outputs, num_inputs = weight.shape
    is_awq, size = config["quant_method"] == "awq", config["group_size"] if config["group_size"] > 0 else num_inputs
    groups = torch.arange(num_inputs) // size
    if config.get("desc_act"):
        kind = name.rpartition(".")[2]
        seed = sum(map(ord, _FIRST_OF.get(kind, kind)))
        groups = groups[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(seed))]
    by_group = weight.float().t()[torch.argsort(groups, stable=True)].unflatten(0, (-1, size))  # [G, size, N]
    if config.get("sym", False) or config.get("zero_point") is False:
        scales, zeros = (by_group.abs().amax(1) / 7.5).to(dtype), torch.full((len(by_group), num_outputs), 8)
    else:
        low, high = by_group.amin(1), by_group.amax(1)
        scales = ((high - low) / 15).to(dtype)
        zeros = (-low / scales.float()).round().clamp(1, 15).long()
        zeros[0, :2] = torch.tensor((16 if config.get("checkpoint_format") == "gptq" else 0, 15))  # the furthest that can be stored
    numbers = (weight.float().t() / scales.float()[groups] + zeros[groups]).round().clamp(0, 15).long()  # [K, N]
    if is_awq:
        return {
            f"{name}.qweight": packed(numbers, AWQ_ORDER),
            f"{name}.qzeros": packed(zeros, AWQ_ORDER),
            f"{name}.scales": scales,
        }
    return {
        f"{name}.qweight": packed(numbers.t()).t().contiguous(),
        f"{name}.qzeros": packed(zeros - int(config["checkpoint_format"] == "gptq")),
        f"{name}.scales": scales,
        f"{name}.g_idx": groups.int(),
    }


def quantize(
    source: Path, target: Path, config: dict[str, Any], plain: str = "-", dtype: torch.dtype = torch.float16
) -> dict[str, Tensor]:
    """Writes the checkpoint in `source`, one file, to `target` with its layers' matrices quantised, but for those with `plain` in
    their name. Returns the weights that these stand for, float32. dtype: that of the scales."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    settings = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    tensors, meant = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")) or plain in name:
            tensors[name] = tensor
            continue
        own = stored(tensor, name.removesuffix(".weight"), config, dtype)
        meant[name] = dequantised(own, name.removesuffix(".weight"), config)
        tensors |= own
    save_file(tensors, target / "model.safetensors")
    return meant
