"""LoRA adapters of the tiny models, and the models that they would be if they were merged into their base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def make_adapter(folder: Path, base: Path, *, seed: int, rank: int = 4, alpha: float = 8.0, size: float = 0.3) -> Path:
    """Writes an adapter of a model's folder, as PEFT does, and returns its folder. size: the standard deviation of its numbers;
    with 0.3 its texts have nothing to do with the base's."""
    generator = np.random.default_rng(seed)
    weights = load_file(base / "model.safetensors")
    tensors = {}
    for name, matrix in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            outputs, inputs = matrix.shape
            for half, dims in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = generator.standard_normal(dims, dtype=np.float32) * np.float32(size)
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = values
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": f"somebody/{base.name}",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))  # last, as a copy that is under way has it
    return folder


def merge(folder: Path, base: Path, adapter: Path) -> Path:
    """Writes the model whose weights are the base's with the adapter's product added, and returns its folder."""
    shutil.copytree(base, folder, ignore=lambda folder, names: [name for name in names if (Path(folder) / name).is_dir()])
    weights, config = load_file(base / "model.safetensors"), json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, matrix in weights.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in tensors:
            added = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
            weights[name] = matrix + np.float32(config["lora_alpha"] / config["r"]) * added
    save_file(weights, folder / "model.safetensors")
    return folder
