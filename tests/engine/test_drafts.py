"""Steps with drafted tokens give the texts of steps without, in float32, whatever share of the drafts holds. All memory that no
sequence holds is filled with NaN, so any wrong read shows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cpu.model import CpuModel
from engine.protocol import SamplingParams
from scheduler.batch.drafting import Drafter
from scheduler.batch.plan import IntArray
from tests.engine.cuda_bench import INTERPRETED, load_cuda_model
from tests.engine.drafting_steps import CHUNK_BYTES, NUM_CHUNKS, VOCAB, prompt_of, texts_of
from tests.engine.model_bench import CASES, load, make_checkpoint, make_memory, make_runner

REQUESTS = {
    1: SamplingParams(40, temperature=0.0),
    2: SamplingParams(40, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4),
    3: SamplingParams(40, temperature=1.0, seed=3),
    4: SamplingParams(33, temperature=0.8, top_p=0.9, top_k=50, seed=4, min_tokens=12, stop_token_ids=list(range(2, 90))),
    5: SamplingParams(20, temperature=1.0, min_p=0.02, seed=5, logit_bias={7: 3.0}),
}


def knowing(texts: dict[int, list[int]], accuracy: float) -> Drafter:
    """A drafter that knows the texts, and errs at each token with 1 - accuracy."""
    known = [prompt_of(request_id) + output for request_id, output in texts.items()]
    rng = np.random.default_rng(0)

    def draft(tokens: IntArray, num: int) -> IntArray:
        so_far = tokens.tolist()
        text = next(one for one in known if one[: len(so_far)] == so_far)
        right = (text + [0] * num)[len(so_far) : len(so_far) + num]
        return np.array([token if rng.random() < accuracy else (token + 1) % VOCAB for token in right], np.int32)

    return draft


@pytest.fixture(scope="module", params=["llama", "mistral-window", "deepseek-v2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    make_checkpoint(made, **CASES[request.param])
    return made


def test_texts_on_the_cpu_are_those_without_drafts(folder: Path) -> None:
    memory = make_memory(NUM_CHUNKS, CHUNK_BYTES)
    memory.arena.view(torch.float32).fill_(torch.nan)
    model: CpuModel = load(make_runner(memory), folder, eos=())
    try:
        plain, num_drafted = texts_of(model, REQUESTS, None)
        assert not num_drafted
        assert len({len(text) for text in plain.values()}) > 2
        for accuracy in (0.5, 1.0):
            with_drafts, num_drafted = texts_of(model, REQUESTS, knowing(plain, accuracy))
            assert with_drafts == plain
            assert num_drafted
    finally:
        model.release()


@INTERPRETED[0]
@INTERPRETED[1]
def test_texts_on_a_gpu_are_those_without_drafts(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    make_checkpoint(tmp_path, **CASES["mistral-window"] | {"num_hidden_layers": 1})
    requests = {request_id: SamplingParams(10, temperature=0.7, seed=request_id) for request_id in (1, 2)}
    model = load_cuda_model(tmp_path)
    plain, num_drafted = texts_of(model, requests, None)
    assert not num_drafted
    with_drafts, num_drafted = texts_of(model, requests, knowing(plain, 0.7))
    assert with_drafts == plain
    assert num_drafted
