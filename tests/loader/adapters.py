"""Small LoRA adapters written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loader.configs.adapter_matrices import adapted_matrices
from loader.shapes.model_shape import ModelShape
from tests.loader.checkpoints import safetensors_bytes

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
ADAPTER_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "org/base",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "lora_dropout": 0.05,
    "target_modules": ["q_proj"],
    "inference_mode": True,
    "modules_to_save": None,
    "use_dora": False,
}


def modules_of(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Every module of a model that adapters may change, as (outputs, inputs)."""
    return {
        matrix.prefix + name: (outputs, matrix.inputs)
        for matrix in adapted_matrices(shape)
        for name, outputs in zip(matrix.names, matrix.outputs, strict=True)
    }


def adapter_tensors(modules: Mapping[str, tuple[int, int]], rank: int = 4, seed: int = 0) -> Tensors:
    """lora_A and lora_B of modules that are (outputs, inputs), random float32."""
    generator, tensors = np.random.default_rng(seed), Tensors()
    for name, (outputs, inputs) in modules.items():
        for suffix, dims in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            data = generator.normal(0, 0.1, dims).astype(np.float32).tobytes()
            tensors[f"base_model.model.{name}.{suffix}.weight"] = ("F32", dims, data)
    return tensors


def write_adapter(folder: Path, tensors: Tensors, **changes: object) -> Path:
    """A complete adapter. changes: of ADAPTER_CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG | changes))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder
