"""Checkpoints with NVFP4 matrices on the cpu device: their weights are those of the definition, and logits follow from them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loading.runner import TorchRunner
from engine.ops import reference
from loader.errors import CheckpointError
from loader.models.catalog import scan_one
from tests.engine.model_bench import CASES, load, load_both, make_checkpoint
from tests.engine.runner.test_fp8 import check_held, check_logits, format_of, logits, logits_of, wanted
from tests.loader.nvfp4 import compressed, hf_quant_config, modelopt, quantize
from tests.loader.packed_checkpoints import pack_checkpoint

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "attention_bias": True}
UP_PROJ = "model.layers.1.mlp.up_proj.weight"
ULP = 2.0**-23


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, make_checkpoint(folder, "qwen3", tie_word_embeddings=False, **SIZES)


@pytest.mark.parametrize(
    ("config", "beside"),
    [(modelopt(), False), (hf_quant_config(), True), (compressed(), False)],
    ids=["modelopt", "hf_quant_config", "compressed"],
)
def test_logits_are_those_of_the_weights_that_are_meant(
    runner: TorchRunner, made: tuple[Path, Any], tmp_path: Path, config: dict[str, Any], beside: bool
) -> None:
    """In float32, against transformers' model with the weights of the definition. The weights are ModelOpt's to the last bit. Where
    they are divided, in float32 they are within what the rounding of an inverse costs, and in bfloat16 the same. Matrices that lie
    end to end have scales of their own."""
    meant = quantize(made[0], tmp_path, config, plain="o_proj", beside=beside)
    stored = load_file(tmp_path / "model.safetensors")
    model = load(runner, tmp_path)
    assert model.weights_bytes == scan_one(tmp_path).weights_bytes["float32"]
    layer: Any = model._model.layers[1]  # type: ignore[attr-defined]
    for matrix, names in (
        (layer.attention.qkv.weight, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.mlp.gate_up.weight, ("mlp.gate_proj", "mlp.up_proj")),
    ):
        own = [f"model.layers.1.{name}.weight" for name in names]
        values, dense = (matrix.packed, matrix.scales, matrix.factors), torch.cat([meant[name] for name in own])
        if config == compressed():
            held = torch.empty_like(dense)
            reference.nvfp4_rows(*values, held)
            assert ((held - dense).abs() <= 2 * ULP * dense.abs()).all()
            assert torch.equal(held.bfloat16(), dense.bfloat16())
        else:
            check_held(partial(reference.nvfp4_rows, *values), [meant[name] for name in own])
            assert len({float(stored[f"{name}_scale_2"]) for name in own}) == len(names)
    check_logits(model, wanted(made[1], meant))
    model.release()


def test_recorded_steps_and_a_packed_copy(runner: TorchRunner, made: tuple[Path, Any], tmp_path: Path) -> None:
    """Recorded steps in bfloat16 give what others give, and a packed copy gives the same. bfloat16 is near float32."""
    meant = quantize(made[0], tmp_path, modelopt())
    recorded, plain = load_both(runner, tmp_path, "bfloat16", quantize=format_of(tmp_path))
    half = logits(plain)
    for _ in range(2):  # recorded, then run again
        assert np.array_equal(logits(recorded), half)
    expected = wanted(made[1], meant)
    assert np.abs(half - expected).mean() < 0.03 * expected.std()
    recorded.release()
    plain.release()
    found = logits_of(runner, tmp_path)
    pack_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert np.array_equal(logits_of(runner, tmp_path), found)


@pytest.mark.parametrize(
    ("config", "part", "said"),
    [
        (modelopt(), "scale", r"holds NaN \(the code 0x7f at byte"),
        (modelopt(), "scale_2", "holds NaN or an infinity: no scale"),
        (compressed(), "global_scale", "holds a number by which scales cannot be divided"),
    ],
)
def test_a_scale_that_is_none_fails_the_load_by_name(
    runner: TorchRunner, made: tuple[Path, Any], tmp_path: Path, config: dict[str, Any], part: str, said: str
) -> None:
    quantize(made[0], tmp_path, config)
    whole = logits_of(runner, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    wrong = tensors[f"{UP_PROJ}_{part}"].float().clone()
    wrong.view(-1)[-1] = 0.0 if part == "global_scale" else float("nan")
    save_file(tensors | {f"{UP_PROJ}_{part}": wrong.to(tensors[f"{UP_PROJ}_{part}"].dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor {UP_PROJ}_{part}: {said}"):
        load(runner, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    assert np.array_equal(logits_of(runner, tmp_path), whole), "the engine serves on"


@pytest.mark.parametrize(("case", "config"), [("deepseek-v3", compressed()), ("qwen3-moe", modelopt())])
def test_experts_and_latents(runner: TorchRunner, tmp_path: Path, case: str, config: dict[str, Any]) -> None:
    """Logits equal those of the plain checkpoint with the weights of the definition, for few rows an expert and for many."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "moe_intermediate_size": 32}
    if case == "deepseek-v3":
        sizes |= {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32}
    make_checkpoint(tmp_path / "plain", **CASES[case] | sizes)
    meant = quantize(tmp_path / "plain", tmp_path / "nvfp4", config)
    assert sum(".experts." in name for name in meant) >= 12
    assert any("kv_b_proj" in name for name in meant) == (case == "deepseek-v3")
    found = logits_of(runner, tmp_path / "nvfp4")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    save_file(tensors | meant, tmp_path / "plain" / "model.safetensors")
    expected = logits_of(runner, tmp_path / "plain")
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
