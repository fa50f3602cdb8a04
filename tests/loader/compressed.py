"""The configurations that compressed-tensors writes, and checkpoints as it writes them with `int-quantized`, made of plain ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from loader.formats.int8_rows import quantize_rows

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False, "group_size": None}
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def config_of(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the configuration that llm-compressor writes. form: compressed-tensors' name of the format."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def quantization_config(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Returns the configuration that llm-compressor writes for W8A8, with changes."""
    return config_of("int-quantized", WEIGHTS | (weights or {}), ACTIVATIONS) | changes


def compress(source: Path, target: Path, scales: torch.dtype = torch.float32, plain: str = "-") -> Path:
    """Writes the checkpoint in `source` to `target` with its layers' matrices in int8, but for those with `plain` in their name."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config()}))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and plain not in name:
            values, scale = torch.empty(tensor.shape, dtype=torch.int8), torch.empty(len(tensor))
            quantize_rows(tensor, values, scale)
            tensors[name], tensors[f"{name}_scale"] = values, scale.to(scales).unsqueeze(1)
    save_file(tensors, target / "model.safetensors")
    return target


def quantize(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """Writes an int-quantized checkpoint as `compress` does, and returns the weights that are meant, by their names, in float32."""
    tensors = load_file(compress(source, target) / "model.safetensors")
    scales = {name: each for name, each in tensors.items() if name.endswith(".weight_scale")}
    return {name.removesuffix("_scale"): tensors[name.removesuffix("_scale")].float() * scales[name] for name in scales}
