"""Checkpoints of each quantised format whose embedding is the head, too, and whose projections are stored fused: their logits are
those of transformers' model with the weights that codes and scales stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from engine.loading.runner import TorchRunner
from loader.models.catalog import scan_one
from tests.engine.model_bench import CASES, load, make_checkpoint
from tests.engine.runner.test_fp8 import check_logits, wanted
from tests.loader import compressed as int_quantized
from tests.loader import fp8, gptq, int4, nvfp4

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "tied": {"kind": "qwen3", "tie_word_embeddings": True},
    "fused": CASES["phi3"] | {"tie_word_embeddings": False},
    "fused-tied": CASES["phi3"] | {"tie_word_embeddings": True},
    "fused-gate-up": CASES["glm4"] | {"tie_word_embeddings": True},
}
FUSED = {
    "tied": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
    "fused": {"qkv_proj", "gate_up_proj"},
    "fused-tied": {"qkv_proj", "gate_up_proj"},
    "fused-gate-up": {"q_proj", "k_proj", "v_proj", "gate_up_proj"},
}


# each writes the checkpoint in the first folder to the second in its format, and returns the weights that are meant
FORMATS: dict[str, Callable[[Path, Path], dict[str, Tensor]]] = {
    "fp8-matrix": lambda source, target: fp8.quantize(source, target, fp8.KINDS["autofp8"]),
    "fp8-outputs": lambda source, target: fp8.quantize(source, target, fp8.KINDS["compressed-channel"]),
    "fp8-blocks": lambda source, target: fp8.quantize(source, target, fp8.KINDS["fine-grained"]),
    "int8": int_quantized.quantize,
    "int4": lambda source, target: int4.quantize(source, target, int4.compressed()),
    "int4-zeros": lambda source, target: int4.quantize(source, target, int4.compressed({"symmetric": False})),
    "gptq": lambda source, target: gptq.quantize(source, target, gptq.gptq()),
    "gptq-desc-act": lambda source, target: gptq.quantize(source, target, gptq.gptq(sym=False, desc_act=True)),
    "awq": lambda source, target: gptq.quantize(source, target, gptq.awq()),
    "nvfp4-modelopt": lambda source, target: nvfp4.quantize(source, target, nvfp4.modelopt()),
    "nvfp4-compressed": lambda source, target: nvfp4.quantize(source, target, nvfp4.compressed()),
}


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, make_checkpoint(folder, **(FAMILIES[request.param] | SIZES))


@pytest.mark.parametrize("form", FORMATS)
def test_logits_are_those_of_the_weights_that_are_meant(
    runner: TorchRunner, made: tuple[str, Path, Any], tmp_path: Path, form: str
) -> None:
    family, plain, theirs = made
    meant = FORMATS[form](plain, tmp_path)
    assert {name.split(".")[-2] for name in meant} == FUSED[family] | {"o_proj", "down_proj"}
    found = scan_one(tmp_path)
    assert found.shape is not None, found.error
    assert found.shape.tie_word_embeddings == ("lm_head.weight" not in load_file(tmp_path / "model.safetensors"))
    assert found.shape.tie_word_embeddings == (family != "fused")
    assert found.shape.stored_format
    assert not found.shape.plain_groups, "no matrix of a layer is plain"
    model = load(runner, tmp_path)
    assert model.weights_bytes == found.weights_bytes["float32"]
    check_logits(model, wanted(theirs, meant))
    model.release()
