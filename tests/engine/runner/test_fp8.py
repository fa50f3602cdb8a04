"""Checkpoints with FP8 matrices on the cpu device: their weights are those that the definition gives, and logits follow from
them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.cpu.model import CpuModel
from engine.loading.runner import TorchRunner
from engine.ops import reference
from loader.errors import CheckpointError
from loader.models.catalog import scan_one
from tests.engine.model_bench import CASES, load, load_both, make_checkpoint, make_table, plan, put
from tests.engine.runner.specs import PROMPT
from tests.loader import compressed as int_quantized
from tests.loader.fp8 import KINDS, quantize
from tests.loader.packed_checkpoints import pack_checkpoint
from tests.loader.shards import divide_in_three

SIZES: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 2, "attention_bias": True}
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model whose matrices have several blocks of 128, of which the last are cut; with biases."""
    folder = tmp_path_factory.mktemp("wide")
    return folder, make_checkpoint(folder, "qwen3", tie_word_embeddings=False, **SIZES)


def format_of(folder: Path) -> str:
    seen = scan_one(folder)
    assert seen.complete, seen.reason or seen.error
    assert seen.shape is not None
    return seen.shape.stored_format


def logits(model: CpuModel) -> np.ndarray:
    """Returns those of a prompt, of single tokens after it, and of a step with pieces of two prompts and a token."""
    table = make_table()
    for slot in range(3):
        put(table, slot, PROMPT)
    found = [model.logits(plan((0, 0, 40)), table, every_token=True)]
    found += [model.logits(plan((0, at, 1)), table) for at in (40, 41, 42)]
    found += [model.logits(plan((0, 43, 1), (1, 0, 20), (2, 0, 5)), table, every_token=True)]
    return np.concatenate(found)


def logits_of(runner: TorchRunner, folder: Path, dtype: str = "float32") -> np.ndarray:
    model = load(runner, folder, dtype, quantize=format_of(folder))
    found = logits(model)
    model.release()
    return found


def wanted(made: Any, meant: dict[str, Tensor]) -> np.ndarray:
    """Returns what transformers' model gives with these weights, in float32."""
    other = copy.deepcopy(made)
    other.load_state_dict(other.state_dict() | meant)
    with torch.inference_mode():
        own = other(torch.tensor([PROMPT])).logits[0].numpy()
    return np.concatenate((own[:44], own[:20], own[:5]))


def check_held(widen: Callable[[Tensor], None], meant: list[Tensor]) -> None:
    """Checks a model's matrix to the last bit. widen: writes its weights. meant: those that lie in it, end to end."""
    dense = torch.cat(meant)
    held = torch.empty_like(dense)
    widen(held)
    assert torch.equal(held, dense)


def check_logits(model: CpuModel, expected: np.ndarray) -> np.ndarray:
    """Checks a model's logits in float32, and returns them."""
    found = logits(model)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_weights_that_codes_and_scales_stand_for(
    runner: TorchRunner, wide: tuple[Path, Any], tmp_path: Path, kind: str
) -> None:
    """In float32, against transformers' model with the weights of the definition; the weights themselves to the last bit."""
    plain = "down_proj" if kind == "fbgemm" else "-"
    meant = quantize(wide[0], tmp_path, KINDS[kind], plain)
    model = load(runner, tmp_path, quantize=format_of(tmp_path))
    assert model.weights_bytes == scan_one(tmp_path).weights_bytes["float32"]
    layer: Any = model._model.layers[1]  # type: ignore[attr-defined]
    for matrix, names in (
        (layer.attention.qkv.weight, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.attention.output.weight, ("self_attn.o_proj",)),
        (layer.mlp.gate_up.weight, ("mlp.gate_proj", "mlp.up_proj")),
    ):
        values = (matrix.values, matrix.scales, matrix.group_inputs)
        check_held(partial(reference.fp8_rows, *values), [meant[f"model.layers.1.{name}.weight"] for name in names])
    check_logits(model, wanted(wide[1], meant))
    model.release()


def test_reloaded_in_several_files_and_packed_they_are_the_same(
    runner: TorchRunner, wide: tuple[Path, Any], tmp_path: Path
) -> None:
    quantize(wide[0], tmp_path, KINDS["fine-grained-bfloat16"])
    once = logits_of(runner, tmp_path)
    assert np.array_equal(logits_of(runner, tmp_path), once), "loaded again"
    divide_in_three(tmp_path)
    assert np.array_equal(logits_of(runner, tmp_path), once), "a matrix and its scales in different files"
    pack_checkpoint(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert np.array_equal(logits_of(runner, tmp_path), once), "packed"


@pytest.mark.parametrize("kind", ["fine-grained", "compressed-channel"])
def test_half_precision_and_recorded_steps(runner: TorchRunner, wide: tuple[Path, Any], tmp_path: Path, kind: str) -> None:
    """Recorded steps give bit for bit what others give. bfloat16 is near float32, within a loose tolerance."""
    meant = quantize(wide[0], tmp_path, KINDS[kind])
    recorded, plain = load_both(runner, tmp_path, "bfloat16", quantize=format_of(tmp_path))
    found = logits(plain)
    for _ in range(2):  # recorded, then run again
        assert np.array_equal(logits(recorded), found)
    expected = wanted(wide[1], meant)
    for other in (found, logits_of(runner, tmp_path, "float16")):
        assert np.abs(other - expected).mean() < 0.03 * expected.std()
    recorded.release()
    plain.release()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (O_PROJ, 0x7F, "holds NaN .the code 0x7f at byte"),
        (O_PROJ, 0xFF, "holds NaN .the code 0xff at byte"),
        (f"{O_PROJ}_scale_inv", float("nan"), "holds NaN or an infinity: no scale"),
        (f"{O_PROJ}_scale_inv", float("inf"), "holds NaN or an infinity: no scale"),
    ],
)
def test_what_is_no_number_fails_the_load_by_name(
    runner: TorchRunner, wide: tuple[Path, Any], tmp_path: Path, name: str, value: float, said: str
) -> None:
    quantize(wide[0], tmp_path, KINDS["fine-grained"])
    whole = logits_of(runner, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damaged = {name: tensors[name].clone()}
    (damaged[name].view(torch.uint8) if isinstance(value, int) else damaged[name])[-1, -1] = value
    save_file(tensors | damaged, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor {name}: {said}"):
        load(runner, tmp_path, quantize=format_of(tmp_path))
    save_file(tensors, tmp_path / "model.safetensors")
    assert np.array_equal(logits_of(runner, tmp_path), whole), "the engine serves on"


@pytest.mark.parametrize("form", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("qwen3-moe", {"num_experts": 4, "num_experts_per_tok": 2}),
        (
            "deepseek-v3",
            {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "kv_lora_rank": 136, "attention_bias": False},
        ),
    ],
)
def test_experts_and_latents_are_those_that_codes_and_scales_stand_for(
    runner: TorchRunner, tmp_path: Path, case: str, changes: dict[str, Any], form: str
) -> None:
    """Logits equal those of the plain checkpoint with the weights of the definition, for few rows an expert and for many; recorded
    steps give what others give."""
    make_checkpoint(tmp_path / "plain", **(CASES[case] | {"hidden_size": 160, "num_hidden_layers": 2} | changes))
    if form == "int8":
        meant = int_quantized.quantize(tmp_path / "plain", tmp_path / form)
    else:
        meant = quantize(tmp_path / "plain", tmp_path / form, KINDS["fine-grained"])
    assert sum(".experts." in name for name in meant) == 4 * 3
    found = logits_of(runner, tmp_path / form)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    save_file(tensors | meant, tmp_path / "plain" / "model.safetensors")
    expected = logits_of(runner, tmp_path / "plain")
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    recorded, plain = load_both(runner, tmp_path / form, "bfloat16", quantize=format_of(tmp_path / form))
    half = logits(plain)
    assert np.array_equal(logits(recorded), half)
    assert np.array_equal(logits(recorded), half)
    assert np.abs(half - expected).mean() < 0.05 * expected.std()
    recorded.release()
    plain.release()
