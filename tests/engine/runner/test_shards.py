"""A checkpoint in one file and the same tensors in three give the same logits, bit for bit: for families whose tensors are stored
in their own ways, and for each format of quantised checkpoints. test_fp8.py, test_gpt_oss.py, test_experts.py and test_states.py do
the same for FP8, MXFP4, plain experts and states.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.loading.runner import TorchRunner
from loader.files.safetensors import SINGLE_NAME
from loader.models.catalog import scan_one
from tests.engine.model_bench import CASES, logits_of, make_checkpoint
from tests.loader import compressed as int_quantized
from tests.loader import gptq, int4, nvfp4
from tests.loader.shards import divide_in_three

PROMPT = np.random.default_rng(11).integers(0, 211, 60).tolist()
STEPS = (40, 1, 1, 18)  # many rows, single ones, and more rows than the kernels of few rows take
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
LATENT = SIZES | {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32, "moe_intermediate_size": 32}
# case, changes of it, and what quantises the folder `source` to `target`; None: the checkpoint stays plain
Quantise = Callable[[Path, Path], Any]
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], Quantise | None]] = {
    "deepseek-v2": ("deepseek-v2", {}, None),
    "deepseek-v3": ("deepseek-v3", {}, None),
    "llama4": ("llama4", {}, None),
    "int4": ("qwen3", SIZES, lambda source, target: int4.quantize(source, target, int4.compressed())),
    "int4-zeros": ("qwen3", SIZES, lambda source, target: int4.quantize(source, target, int4.compressed({"symmetric": False}))),
    "int4-experts-latents": ("deepseek-v3", LATENT, lambda source, target: int4.quantize(source, target, int4.compressed())),
    "gptq": ("qwen3", SIZES, lambda source, target: gptq.quantize(source, target, gptq.gptq(sym=False))),
    "gptq-desc-act": ("qwen3", SIZES, lambda source, target: gptq.quantize(source, target, gptq.gptq(desc_act=True))),
    "awq": ("qwen3", SIZES, lambda source, target: gptq.quantize(source, target, gptq.awq())),
    "nvfp4-modelopt": ("qwen3", SIZES, lambda source, target: nvfp4.quantize(source, target, nvfp4.modelopt())),
    "nvfp4-compressed": ("qwen3", SIZES, lambda source, target: nvfp4.quantize(source, target, nvfp4.compressed())),
    "nvfp4-experts-latents": ("deepseek-v3", LATENT, lambda source, target: nvfp4.quantize(source, target, nvfp4.modelopt())),
    "int-quantized": ("qwen3", SIZES, int_quantized.compress),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_three_files_and_one_are_the_same_model(runner: TorchRunner, tmp_path: Path, name: str) -> None:
    case, changes, quantise = CHECKPOINTS[name]
    made = tmp_path / "plain"
    make_checkpoint(made, **(CASES[case] | changes))
    folder = made if quantise is None else tmp_path / "quantised"
    if quantise is not None:
        quantise(made, folder)
    seen = scan_one(folder)
    assert seen.shape is not None, seen.error
    assert bool(seen.shape.stored_format) == (quantise is not None)
    assert [info.name for info in seen.files] == [SINGLE_NAME]
    dtypes = ("float32", "bfloat16")
    once = [logits_of(PROMPT, runner, folder, dtype, STEPS) for dtype in dtypes]
    divide_in_three(folder)
    assert len(scan_one(folder).files) == 3
    for dtype, logits in zip(dtypes, once, strict=True):
        assert np.isfinite(logits).all()
        assert np.array_equal(logits_of(PROMPT, runner, folder, dtype, STEPS), logits), dtype
