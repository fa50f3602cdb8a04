"""Writes gpt-oss checkpoints as they are published: experts in MXFP4, everything else plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"]}


def draw_mxfp4(num: int, outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns blocks and scales of `num` matrices of any numbers, whose products are about as large as their inputs."""
    blocks = torch.randint(0, 256, (num, outputs, inputs // 32, 16), generator=generator).to(torch.uint8)
    return blocks, torch.randint(121, 125, blocks.shape[:-1], generator=generator).to(torch.uint8)


def save(model: Any, folder: Path, seed: int, num_files: int = 1) -> None:
    """Gives transformers' model random experts in MXFP4, widened by transformers' own function, and saves the checkpoint."""
    from safetensors.torch import save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.state_dict())
    for layer in model.model.layers:
        layer.mlp.experts.limit = model.config.swiglu_limit  # which transformers before 5.18 do not read
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        parameter = tensors.pop(name)
        num, inputs, outputs = parameter.shape
        blocks, scales = draw_mxfp4(num, outputs, inputs, generator)
        parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=parameter.dtype))
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    architectures = {"architectures": ["GptOssForCausalLM"], "quantization_config": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(config | architectures))
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::num_files]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
