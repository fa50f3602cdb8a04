"""Tests what the cases of test_models leave out: both lists of LongRoPE, and half precision where rounding differs by family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.loading.runner import TorchRunner
from tests.engine.cpu_ops import compute_with
from tests.engine.model_bench import (
    CASES,
    load,
    make_checkpoint,
    make_memory,
    make_runner,
    make_table,
    plan,
    put,
)

PROMPT = np.random.default_rng(11).integers(0, 211, 60).tolist()
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 3.0, 9.0],
}


@pytest.fixture(params=["kernels", "reference"])
def runner(request: pytest.FixtureRequest) -> TorchRunner:
    if request.param == "kernels":
        pytest.importorskip("numba")
    return compute_with(make_runner(make_memory()), use_kernels=request.param == "kernels")


def equals(made: Any, runner: TorchRunner, folder: Path, max_len: int, num_tokens: int) -> None:
    """Asserts that logits computed in two parts equal those of transformers' model."""
    model = load(runner, folder, max_len=max_len)
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT[:num_tokens])
    half = num_tokens // 2
    parts = [model.logits(plan((0, at, num)), table, every_token=True) for at, num in ((0, half), (half, num_tokens - half))]
    with torch.inference_mode():
        wanted = made(torch.tensor([PROMPT[:num_tokens]])).logits[0].numpy()
    assert np.abs(wanted).max() > 1.0
    assert np.abs(np.concatenate(parts) - wanted).max() < 2e-4
    model.release()


@pytest.mark.parametrize(("max_len", "num_tokens"), [(32, 32), (128, 60)], ids=["short", "long"])
def test_longrope(runner: TorchRunner, tmp_path: Path, max_len: int, num_tokens: int) -> None:
    """The longest context that a model is served with selects the list of factors. transformers selects by the length of each
    sequence."""
    changes: dict[str, Any] = {
        "head_dim": 8,
        "pad_token_id": 0,
        "original_max_position_embeddings": 32,
        "rope_parameters": LONGROPE,
    }
    made = make_checkpoint(tmp_path, kind="phi3", **changes)
    equals(made, runner, tmp_path, max_len, num_tokens)


def test_a_scaling_of_the_layers_without_windows(runner: TorchRunner, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0}
    rope = {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    changes = {"num_hidden_layers": 4, "sliding_window": 9, "pad_token_id": 0, "rope_parameters": rope}
    made = make_checkpoint(tmp_path, kind="olmo3", **changes)
    equals(made, runner, tmp_path, 128, 60)


@pytest.mark.parametrize("max_len", [32, 60])
def test_dynamic_rope(runner: TorchRunner, tmp_path: Path, max_len: int) -> None:
    """The frequencies are those that transformers uses for a sequence as long as the longest context that is served."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    made = make_checkpoint(tmp_path, kind="llama", max_position_embeddings=32, rope_parameters=rope)
    equals(made, runner, tmp_path, max_len, max_len)


@pytest.mark.parametrize(
    "case",
    ["mistral-window", "phi3-partial-window", "gemma2", "gemma3", "olmo2", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2"],
)
def test_bfloat16_follows_transformers(runner: TorchRunner, tmp_path: Path, case: str) -> None:
    """The mean error against float32 is at most 1.2 times that of transformers in bfloat16."""
    whole = make_checkpoint(tmp_path, **CASES[case])
    model = load(runner, tmp_path, "bfloat16")
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT)
    model.logits(plan((0, 0, 50)), table)
    put(table, 1, PROMPT)
    actual = np.concatenate((model.logits(plan((1, 0, 59)), table, True), model.logits(plan((0, 50, 9)), table, True)))
    with torch.inference_mode():
        exact = whole(torch.tensor([PROMPT])).logits[0].numpy()
        half = copy.deepcopy(whole).to(torch.bfloat16)(torch.tensor([PROMPT])).logits[0].float().numpy()
    wanted, exact = np.concatenate((half[:59], half[50:59])), np.concatenate((exact[:59], exact[50:59]))
    assert np.abs(actual - exact).mean() < 1.2 * np.abs(wanted - exact).mean()
    model.release()
