"""A checkpoint's scales of keys and values are not used, and what is known of the model says so: their number and names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loader.files.safetensors import INDEX_NAME
from loader.formats.kv_scales import is_kv_scale, unused_kv_scales
from loader.models.catalog import scan_one
from loader.models.described_model import HEADERS, INDEX, described_model
from tests.loader import compressed, fp8, int4, nvfp4
from tests.loader.checkpoints import CONFIG, write_checkpoint

SIZES = {"hidden_size": 128, "head_dim": 16, "intermediate_size": 64, "num_hidden_layers": 2}
FORMATS: dict[str, Callable[[Path, Path], Any]] = {
    "fp8": lambda source, target: fp8.quantize(source, target, fp8.KINDS["modelopt"]),
    "int8": compressed.compress,
    "int4": lambda source, target: int4.quantize(source, target, int4.compressed()),
    "nvfp4": lambda source, target: nvfp4.quantize(source, target, nvfp4.modelopt()),
}
TOLD = "4 scales of keys and values in its files (k_scale, v_scale) are not used: KV is held as kv_cache_dtype says"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("plain"), CONFIG | SIZES, dtype="F32", random_bytes=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: torch.nan_to_num(each).clamp(-4, 4) for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


def add(folder: Path, *names: str) -> None:
    """Adds tensors of one number to a checkpoint in one file."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.ones(1) for name in names}, folder / "model.safetensors")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_checkpoint_with_scales_of_kv_says_that_they_are_not_used(plain: Path, tmp_path: Path, kind: str) -> None:
    """Checks also that this is known where only the index of its files is there. Scales of activations alone are nothing to tell:
    products have activations of the model's dtype, which is more exact."""
    FORMATS[kind](plain, tmp_path)
    add(tmp_path, "model.layers.0.self_attn.q_proj.input_scale")
    assert scan_one(tmp_path).complete, scan_one(tmp_path).error
    assert scan_one(tmp_path).notes == described_model(tmp_path).notes == ()
    add(tmp_path, *(f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("k_scale", "v_scale")))
    found, described = scan_one(tmp_path), described_model(tmp_path)
    assert found.complete, found.error
    assert found.notes == described.notes == (TOLD,)
    assert described.source == HEADERS
    files = dict.fromkeys(load_file(tmp_path / "model.safetensors"), "model-00001-of-00001.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (tmp_path / "model.safetensors").unlink()
    described = described_model(tmp_path)
    assert (described.source, described.notes) == (INDEX, (TOLD,))


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("model.layers.0.self_attn.k_scale", True),  # llm-compressor
        ("model.layers.0.self_attn.v_proj.v_scale", True),  # ModelOpt
        ("model.layers.0.self_attn.kv_scale", True),  # AutoFP8
        ("model.layers.0.self_attn.k_proj.output_scale", True),  # Quark
        ("model.layers.0.mlp.up_proj.output_scale", False),
        ("model.layers.0.self_attn.k_proj.weight_scale", False),
        ("model.layers.0.self_attn.k_proj.input_scale", False),
        ("model.layers.0.self_attn.k_proj.weight", False),
    ],
)
def test_which_tensors_are_scales_of_kv(name: str, is_one: bool) -> None:
    assert is_kv_scale(name) == is_one
    assert bool(unused_kv_scales(["lm_head.weight", name])) == is_one
