"""Checkpoints with FP8 (e4m3) matrices as their producers write them, made of plain ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.loader.compressed import config_of

LARGEST = 448.0
BLOCK = 128
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False, "block_structure": None}
TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Returns the configuration that llm-compressor writes for FP8-dynamic, with changes."""
    return config_of("float-quantized", WEIGHTS | (weights or {}), TOKEN) | changes


def quark(qscheme: str = "per_tensor", **changes: Any) -> dict[str, Any]:
    """Returns the configuration that Quark writes for FP8 with FP8 KV, with changes."""
    spec = {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": qscheme, "ch_axis": None, "group_size": None, "symmetric": None}
    layers = {"bias": None, "input_tensors": spec | {"qscheme": "per_tensor"}, "output_tensors": None, "weight": spec}
    return {
        "quant_method": "quark",
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": layers,
        "layer_quant_config": {"*k_proj": layers | {"output_tensors": spec}, "*v_proj": layers | {"output_tensors": spec}},
        "layer_type_quant_config": {},
    } | changes


FINE_GRAINED = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
FBGEMM = {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"], "quant_method": "fbgemm_fp8"}
MODELOPT = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.33.1"},
    "quant_algo": "FP8",
    "quant_method": "modelopt",
}


def of_matrix(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax() / LARGEST
    return (weight / scale).to(torch.float8_e4m3fn), scale


def of_outputs(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / LARGEST
    return (weight / scale).to(torch.float8_e4m3fn), scale


def of_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes [N, K] and scales, one for each block, as DeepSeek-V3's conversion makes them."""
    outputs, inputs = weight.shape
    padded = torch.zeros(-(-outputs // BLOCK) * BLOCK, -(-inputs // BLOCK) * BLOCK)
    padded[:outputs, :inputs] = weight
    scale = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3)) / LARGEST
    return (weight / spread(scale, weight.shape)).to(torch.float8_e4m3fn), scale


def spread(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns each weight's scale. scale: of the matrix [], of each output [N, 1], or of each block."""
    if scale.dim() == 2 and scale.shape != (shape[0], 1):
        return scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]
    return scale


class Kind(NamedTuple):
    """One producer's way: its configuration, the name and dtype of scales, and how a matrix becomes codes and scales."""

    config: dict[str, Any]
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    suffix: str = "_scale"
    dtype: torch.dtype = torch.float32
    shape: Callable[[Tensor], Tensor] = lambda scale: scale


KINDS = {
    "fine-grained": Kind(FINE_GRAINED, of_blocks, "_scale_inv"),
    "fine-grained-bfloat16": Kind(FINE_GRAINED, of_blocks, "_scale_inv", torch.bfloat16),
    "autofp8": Kind({"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}, of_matrix),
    "transformers-matrix": Kind(FINE_GRAINED | {"weight_block_size": None}, of_matrix, "_scale_inv"),
    "compressed-tensor": Kind(compressed({"strategy": "tensor"}), of_matrix, shape=lambda scale: scale.view(1)),
    "compressed-channel": Kind(compressed(), of_outputs, dtype=torch.bfloat16),
    "compressed-block": Kind(compressed({"strategy": "block", "block_structure": [BLOCK, BLOCK]}), of_blocks),
    "fbgemm": Kind(FBGEMM, of_outputs),
    "modelopt": Kind(MODELOPT, of_matrix),
    "quark-channel": Kind(quark("per_channel"), of_outputs, shape=lambda scale: scale.view(-1)),
}


def quantize(source: Path, target: Path, kind: Kind, plain: str = "-") -> dict[str, Tensor]:
    """Writes the checkpoint in `source`, one file, to `target` with its layers' matrices in FP8, but for those with `plain` in
    their name. Returns the weights that these stand for, float32: of each matrix the codes' values times their scales."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": kind.config}))
    tensors, meant = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and plain not in name:
            values, scale = kind.quantize(tensor.float())
            scale = scale.to(kind.dtype)
            meant[name] = values.float() * spread(scale.float(), tensor.shape)
            tensors[name], tensors[name + kind.suffix] = values, kind.shape(scale).contiguous()
            tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(())
    save_file(tensors, target / "model.safetensors")
    return meant
