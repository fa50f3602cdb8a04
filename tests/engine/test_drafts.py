"""Steps with drafted tokens give the texts of steps without, in float32, whatever share of the drafts holds. All memory that no
sequence holds is filled with NaN, so any wrong read shows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cpu.model import CpuModel
from engine.cuda.model import CudaModel
from engine.protocol import LoadModel, SamplingParams
from engine.serve.kv_caches import make_kv_cache
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.drafting import Drafter
from scheduler.batch.plan import IntArray
from scheduler.batch.request import BatchRequest
from scheduler.batch.step_room import StepRoom
from tests.engine.cuda_bench import INTERPRETED, load_cuda_model
from tests.engine.model_bench import CASES, MAX_LEN, load, make_checkpoint, make_memory, make_runner

NUM_CHUNKS, CHUNK_BYTES, BATCHED_TOKENS, VOCAB = 64, 4096, 24, 211
REQUESTS = {
    1: SamplingParams(40, temperature=0.0),
    2: SamplingParams(40, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4),
    3: SamplingParams(40, temperature=1.0, seed=3),
    4: SamplingParams(33, temperature=0.8, top_p=0.9, top_k=50, seed=4, min_tokens=12, stop_token_ids=list(range(2, 90))),
    5: SamplingParams(20, temperature=1.0, min_p=0.02, seed=5, logit_bias={7: 3.0}),
}


def prompt_of(request_id: int) -> list[int]:
    prompt: list[int] = np.random.default_rng(request_id).integers(2, VOCAB, 5 + 4 * request_id).tolist()
    return prompt


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


def texts_of(model: CpuModel | CudaModel, requests: dict[int, SamplingParams], drafter: Drafter | None) -> dict[int, list[int]]:
    """Returns the outputs of the requests, which run together, with a preemption on the way."""
    spec = LoadModel(1, "tiny", "", "float32", "", 0, 30, 20, MAX_LEN, 8, [])
    kv = make_kv_cache(spec, model.kv_groups, ChunkPool(NUM_CHUNKS, CHUNK_BYTES, 20), BATCHED_TOKENS)
    scheduler = BatchScheduler("tiny", kv, BatchLimits(8, MAX_LEN, BATCHED_TOKENS, (), "f", "float32"), drafter)
    output: dict[int, list[int]] = {request_id: [] for request_id in requests}
    for request_id, params in requests.items():
        tokens = np.array(prompt_of(request_id), np.int32)
        scheduler.submit(BatchRequest(request_id, tokens, len(tokens), params))
    num_drafted = steps = 0
    while (plan := scheduler.plan(steps, StepRoom(max_tokens=9 if steps % 3 else None))) is not None:
        steps += 1
        result = model.execute(plan, scheduler.table)
        outcome = scheduler.finish_step(plan, result.ids, result.bad)
        assert not outcome.bad, "it read what is not its own"
        told = iter(outcome.ids)
        for request_id, count in zip(outcome.request_ids, outcome.counts or [1] * len(outcome.ids), strict=True):
            output[request_id] += [next(told) for _ in range(count)]
        num_drafted += sum(outcome.drafted)
        if steps == 12:
            scheduler.preempt_one()
        for group, memory in zip(kv.groups, model._kv if isinstance(model, CpuModel) else model._memory, strict=True):
            memory.kv[group.pool._stack[: group.pool.num_free].astype(np.int64)] = torch.nan
    assert bool(num_drafted) == (drafter is not None)
    return output


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
        plain = texts_of(model, REQUESTS, None)
        assert len({len(text) for text in plain.values()}) > 2
        for accuracy in (0.5, 1.0):
            assert texts_of(model, REQUESTS, knowing(plain, accuracy)) == plain
    finally:
        model.release()


@INTERPRETED[0]
@INTERPRETED[1]
def test_texts_on_a_gpu_are_those_without_drafts(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    make_checkpoint(tmp_path, **CASES["mistral-window"] | {"num_hidden_layers": 1})
    requests = {request_id: SamplingParams(10, temperature=0.7, seed=request_id) for request_id in (1, 2)}
    model = load_cuda_model(tmp_path)
    plain = texts_of(model, requests, None)
    assert texts_of(model, requests, knowing(plain, 0.7)) == plain
