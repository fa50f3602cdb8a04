"""A mixture of experts as a whole: in several files, in half precision, and after its requests were preempted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.loading.runner import TorchRunner
from tests.engine.model_bench import CASES, load, logits_of, make_checkpoint, runner_with_kernels

PROMPT = np.random.default_rng(11).integers(0, 211, 60).tolist()


runner = pytest.fixture(scope="module")(runner_with_kernels)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen2-moe")
    return folder, make_checkpoint(folder, **CASES["qwen2-moe"])


logits = partial(logits_of, PROMPT)


def test_three_files_and_one_are_the_same_model(runner: TorchRunner, saved: tuple[Path, Any], tmp_path: Path) -> None:
    saved[1].save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    assert np.array_equal(logits(runner, tmp_path), logits(runner, saved[0]))


def test_what_a_preempted_request_computes_again_is_the_same(runner: TorchRunner, saved: tuple[Path, Any]) -> None:
    """A request that comes back computes its prompt and its output so far as one prompt, where it had computed them token by
    token."""
    with torch.inference_mode():
        wanted = saved[1](torch.tensor([PROMPT])).logits[0].numpy()
    for steps in ((20, *[1] * 40), (60,), (7, 33, 20)):
        assert np.abs(logits(runner, saved[0], steps=steps) - wanted).max() < 2e-4


def test_latents_are_expanded_and_absorbed_to_the_same(runner: TorchRunner, tmp_path: Path) -> None:
    """Long chunks of a prompt make keys and values of its latents, short ones and single tokens read the latents."""
    made = make_checkpoint(tmp_path, **CASES["deepseek-v3"])
    with torch.inference_mode():
        wanted = made(torch.tensor([PROMPT])).logits[0].numpy()
    for steps in ((20, *[1] * 40), (60,), (7, 33, 20), (16, 16, 17, 11)):
        assert np.abs(logits(runner, tmp_path, steps=steps) - wanted).max() < 2e-4


def test_float16_follows_float32(runner: TorchRunner, saved: tuple[Path, Any]) -> None:
    exact, half = logits(runner, saved[0]), logits(runner, saved[0], "float16")
    assert np.abs(half - exact).mean() < 0.01 * np.abs(exact).mean()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["stored-float32", "stored-bfloat16"])
def test_a_router_stays_float32_in_a_bfloat16_model(runner: TorchRunner, tmp_path: Path, stored: torch.dtype) -> None:
    whole = make_checkpoint(tmp_path, dtype=stored, **CASES["glm4-moe"])
    model = load(runner, tmp_path, "bfloat16")
    mixture, gate = model._model.layers[1].mlp, whole.model.layers[1].mlp.gate
    assert mixture.router.dtype is mixture.experts.sigmoid.correction.dtype is torch.float32
    assert torch.equal(mixture.router, gate.weight.float())
    assert torch.equal(mixture.experts.sigmoid.correction, gate.e_score_correction_bias.float())
    model.release()
    exact, half = logits(runner, tmp_path), logits(runner, tmp_path, "bfloat16")
    assert np.abs(half - exact).mean() < 0.05 * np.abs(exact).mean()
