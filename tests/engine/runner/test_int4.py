"""Checkpoints with INT4 matrices on the cpu device: their weights are those of the definition, and logits follow from them."""

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
from tests.loader.int4 import BY_OUTPUT, compressed, quantize, wrap_in_kimi_k25
from tests.loader.packed_checkpoints import pack_checkpoint

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "attention_bias": True}
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, make_checkpoint(folder, "qwen3", tie_word_embeddings=False, **SIZES)


@pytest.mark.parametrize("config", [compressed(), BY_OUTPUT, compressed({"symmetric": False})], ids=["groups", "outputs", "zeros"])
def test_logits_are_those_of_the_weights_that_are_meant(
    runner: TorchRunner, made: tuple[Path, Any], tmp_path: Path, config: dict[str, Any]
) -> None:
    """In float32, against transformers' model with the weights of the definition; the weights themselves to the last bit. A packed
    copy gives the same, recorded steps in bfloat16 give what others give."""
    meant = quantize(made[0], tmp_path, config, plain="o_proj")
    model = load(runner, tmp_path)
    assert model.weights_bytes == scan_one(tmp_path).weights_bytes["float32"]
    layer: Any = model._model.layers[1]  # type: ignore[attr-defined]
    for matrix, names in (
        (layer.attention.qkv.weight, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.mlp.gate_up.weight, ("mlp.gate_proj", "mlp.up_proj")),
    ):
        values = (matrix.packed, matrix.scales, matrix.zeros, matrix.group_inputs)
        check_held(partial(reference.int4_rows, *values), [meant[f"model.layers.1.{name}.weight"] for name in names])
    expected = wanted(made[1], meant)
    found = check_logits(model, expected)
    model.release()
    recorded, plain = load_both(runner, tmp_path, "bfloat16", quantize=format_of(tmp_path))
    half = logits(plain)
    for _ in range(2):  # recorded, then run again
        assert np.array_equal(logits(recorded), half)
    assert np.abs(half - expected).mean() < 0.03 * expected.std()
    recorded.release()
    plain.release()
    pack_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert np.array_equal(logits_of(runner, tmp_path), found)


@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [
        (float("nan"), torch.bfloat16, "holds NaN or an infinity: no scale"),
        (float("inf"), torch.bfloat16, "holds NaN or an infinity: no scale"),
        (1 + 2**-10, torch.float16, "holds a scale that is no bfloat16, in which scales are held"),
    ],
)
def test_a_scale_that_cannot_be_held_fails_the_load_by_name(
    runner: TorchRunner, made: tuple[Path, Any], tmp_path: Path, value: float, dtype: torch.dtype, said: str
) -> None:
    quantize(made[0], tmp_path, compressed())
    whole = logits_of(runner, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    scales = tensors[f"{UP_PROJ}_scale"].clone()
    scales[:] = 1.0
    scales = scales.to(dtype)
    scales[-1, -1] = value
    save_file(tensors | {f"{UP_PROJ}_scale": scales}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor {UP_PROJ}_scale: {said}"):
        load(runner, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    assert np.array_equal(logits_of(runner, tmp_path), whole), "the engine serves on"


def test_experts_and_latents_in_int4(runner: TorchRunner, tmp_path: Path) -> None:
    """Logits equal those of the plain checkpoint with the weights of the definition, for few rows an expert and for many."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "moe_intermediate_size": 32, "q_lora_rank": 32}
    sizes |= {"kv_lora_rank": 32, "v_head_dim": 32}
    make_checkpoint(tmp_path / "plain", **CASES["deepseek-v3"] | sizes)
    meant = quantize(tmp_path / "plain", tmp_path / "int4", compressed())
    assert sum(".experts." in name for name in meant) == 12 * 3
    assert any("kv_b_proj" in name for name in meant)
    found = logits_of(runner, tmp_path / "int4")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    save_file(tensors | meant, tmp_path / "plain" / "model.safetensors")
    expected = logits_of(runner, tmp_path / "plain")
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("text_type", ["kimi_k2", "deepseek_v3"])
def test_logits_of_kimi_k25(runner: TorchRunner, tmp_path: Path, text_type: str) -> None:
    """Against transformers' DeepseekV3ForCausalLM with the weights of the definition. Routed experts alone are in INT4, as
    published; the encoder and what joins it to the text model are not read."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "moe_intermediate_size": 32}
    sizes |= {"n_group": 1, "topk_group": 1, "tie_word_embeddings": False}
    make_checkpoint(tmp_path / "plain", **CASES["deepseek-v3"] | sizes)
    meant = quantize(tmp_path / "plain", tmp_path / "kimi", compressed(), only=".experts.")
    assert len(meant) == 12 * 3, "all of the one layer of experts"
    wrap_in_kimi_k25(tmp_path / "kimi", text_type)
    found = scan_one(tmp_path / "kimi")
    assert found.complete, found.reason or found.error
    assert found.shape is not None
    assert found.shape.architecture == "KimiK25ForConditionalGeneration"
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    save_file(tensors | meant, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="eager")
    expected = wanted(theirs.float().eval(), {})
    assert np.abs(logits_of(runner, tmp_path / "kimi") - expected).max() < 2e-3 * np.abs(expected).max()
