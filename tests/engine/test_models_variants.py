"""Tests what the cases of test_models leave out: both lists of LongRoPE, and half precision where rounding differs by family."""

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

from engine.loading.runner import TorchRunner
from tests.engine.cpu_ops import compute_with
from tests.engine.model_bench import (
    CASES,
    load,
    logits_of,
    make_checkpoint,
    make_memory,
    make_runner,
    make_table,
    plan,
    put,
)
from tests.loader import fp8, int4

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


VARIANTS: dict[str, dict[str, Any]] = {
    "glm": {
        "kind": "glm",
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "seed-oss": {"kind": "seed_oss", "num_hidden_layers": 2, "attention_out_bias": True, "tie_word_embeddings": True},
    "granite": {
        "kind": "granite",
        "embedding_multiplier": 1.7,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.13,
        "logits_scaling": 0.8,
        "attention_bias": True,
    },
    "cohere": {"kind": "cohere", "num_hidden_layers": 2, "head_dim": 8, "pad_token_id": 0, "logit_scale": 0.75},
    "phi": {"kind": "phi", "head_dim": 8, "layer_norm_eps": 1e-3, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("case", VARIANTS)
def test_dense_families(runner: TorchRunner, tmp_path: Path, case: str) -> None:
    """Their ways of computing that no case of test_models has: GLM's two norms a layer around matrices that GLM-4 has too; a key
    for one bias; factors of embeddings, branches, scores and logits; rotation of all layers beside LayerNorm; an MLP without a
    gate, and biases of norms and of the head."""
    made = make_checkpoint(tmp_path, **VARIANTS[case])
    equals(made, runner, tmp_path, 128, 60)


@pytest.mark.parametrize(
    ("case", "quantize"),
    [
        ("phi", partial(int4.quantize, config=int4.compressed())),
        ("cohere", partial(fp8.quantize, kind=fp8.KINDS["fine-grained"])),
    ],
    ids=["phi-int4", "cohere-fp8"],
)
def test_dense_families_with_quantised_weights(
    runner: TorchRunner, tmp_path: Path, case: str, quantize: Callable[..., dict[str, torch.Tensor]]
) -> None:
    """Their logits equal those of the plain checkpoint with the weights that are meant."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_hidden_layers": 2}
    make_checkpoint(tmp_path / "plain", **VARIANTS[case] | sizes)
    meant = quantize(tmp_path / "plain", tmp_path / "small")
    assert {name.split(".")[-2] for name in meant} >= ({"fc1", "dense"} if case == "phi" else {"gate_proj", "o_proj"})
    found = logits_of(PROMPT, runner, tmp_path / "small")
    save_file(load_file(tmp_path / "plain" / "model.safetensors") | meant, tmp_path / "plain" / "model.safetensors")
    wanted = logits_of(PROMPT, runner, tmp_path / "plain")
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("max_len", [32, 60])
def test_dynamic_rope(runner: TorchRunner, tmp_path: Path, max_len: int) -> None:
    """The frequencies are those that transformers uses for a sequence as long as the longest context that is served."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    made = make_checkpoint(tmp_path, kind="llama", max_position_embeddings=32, rope_parameters=rope)
    equals(made, runner, tmp_path, max_len, max_len)


# with them a few scores that are nearly equal decide in which of both more experts are not those of float32
WITHOUT_EXPERTS: dict[str, dict[str, Any]] = {"gemma4": {"enable_moe_block": False}}


@pytest.mark.parametrize(
    "case",
    [
        "mistral-window",
        "phi3-partial-window",
        "gemma2",
        "gemma3",
        "gemma4",
        "olmo2",
        "cohere2",
        "mixtral",
        "qwen2-moe",
        "qwen3-moe",
        "deepseek-v2",
    ],
)
def test_bfloat16_follows_transformers(runner: TorchRunner, tmp_path: Path, case: str) -> None:
    """The mean error against float32 is at most 1.2 times that of transformers in bfloat16."""
    whole = make_checkpoint(tmp_path, **(CASES[case] | WITHOUT_EXPERTS.get(case, {})))
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
