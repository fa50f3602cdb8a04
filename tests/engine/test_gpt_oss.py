"""gpt-oss with its experts in MXFP4: in several files, in half precision, after its requests were preempted, and behind its
weights. test_models.py compares every other kind of step with transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.loading.runner import TorchRunner
from engine.protocol import LoadDone, LoadStreams
from tests.engine import gpt_oss_checkpoint
from tests.engine.first_step.bench import PROMPT as SHORT_PROMPT
from tests.engine.first_step.bench import Bench
from tests.engine.model_bench import CASES, logits_of, make_checkpoint, runner_with_kernels
from tests.kernel_cache import warm

PROMPT = np.random.default_rng(11).integers(0, 211, 60).tolist()


runner = pytest.fixture(scope="module")(runner_with_kernels)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    warm()
    folder = tmp_path_factory.mktemp("gpt-oss")
    return folder, make_checkpoint(folder, **CASES["gpt-oss"])


logits = partial(logits_of, PROMPT)


def test_three_files_and_one_are_the_same_model(runner: TorchRunner, saved: tuple[Path, Any], tmp_path: Path) -> None:
    gpt_oss_checkpoint.save(saved[1], tmp_path, 3, num_files=3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert np.array_equal(logits(runner, tmp_path), logits(runner, saved[0]))


def test_what_a_preempted_request_computes_again_is_the_same(runner: TorchRunner, saved: tuple[Path, Any]) -> None:
    with torch.inference_mode():
        wanted = saved[1](torch.tensor([PROMPT])).logits[0].numpy()
    for steps in ((20, *[1] * 40), (7, 33, 20)):
        assert np.abs(logits(runner, saved[0], steps=steps) - wanted).max() < 2e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_float32(runner: TorchRunner, saved: tuple[Path, Any], dtype: str) -> None:
    exact, half = logits(runner, saved[0]), logits(runner, saved[0], dtype)
    assert np.abs(half - exact).mean() < (0.05 if dtype == "bfloat16" else 0.01) * np.abs(exact).mean()


def test_a_prompt_is_computed_while_experts_still_arrive(saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(saved[0], monkeypatch)
    bench.load(quantize="mxfp4")
    bench.until(LoadDone)
    bench.submit(1)
    (wanted,) = bench.until_answered(1)
    bench.evict()
    bench.allow(1)
    bench.load(quantize="mxfp4")
    bench.until(LoadStreams)
    bench.submit(7)
    bench.submit(8, SHORT_PROMPT[:9])
    bench.until_waits_for(2)
    assert bench.kinds().count("LoadDone") == 0
    bench.allow(99)
    assert bench.until_answered(7)[0] == wanted
    bench.pump(lambda: not bench.engine.models.busy())
    bench.evict()
