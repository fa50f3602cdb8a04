"""Drafts of a model's own predictor are those of transformers' parts, and texts with them are those without. All memory that no
sequence holds is filled with NaN, so any wrong read shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cpu import model as cpu_model
from engine.cpu.model import CpuModel
from engine.loading.runner import TorchRunner
from engine.memory.weight_arrivals import parameter_places
from engine.memory.weight_gate import WeightGate
from engine.protocol import EAGLE3, MTP, LoadModel, SamplingParams
from engine.serve.kv_caches import make_kv_cache
from loader.layout import weight_layout
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.prompt_lookup import looked_up
from scheduler.batch.request import BatchRequest
from scheduler.batch.step_room import StepRoom
from tests.engine.drafting_steps import check_drafts
from tests.engine.eagle_checkpoint import FORMS, EagleReference, make_head
from tests.engine.model_bench import CASES, MAX_LEN, load, make_checkpoint, make_memory, make_runner, make_table, plan, put
from tests.engine.predictor_checkpoint import Reference, make_predicting_checkpoint

NUM_CHUNKS, CHUNK_BYTES, BATCHED_TOKENS, VOCAB = 64, 4096, 24, 211
REQUESTS = {
    1: SamplingParams(40, temperature=0.0),
    2: SamplingParams(30, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4),
    3: SamplingParams(40, temperature=1.0, seed=3),
    4: SamplingParams(33, temperature=0.8, top_p=0.9, top_k=50, seed=4, min_tokens=12, stop_token_ids=list(range(2, 60))),
    5: SamplingParams(20, temperature=0.3, seed=5, logprobs=2),
}


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    memory = make_memory(NUM_CHUNKS, CHUNK_BYTES)
    memory.arena.view(torch.float32).fill_(torch.nan)
    return make_runner(memory)


@dataclass(slots=True, frozen=True)
class Made:
    """A checkpoint with what drafts tokens for it. head: its folder, if it is a head from other files."""

    folder: Path
    reference: Reference | EagleReference
    head: str = ""

    def load(self, runner: TorchRunner) -> CpuModel:
        return load(runner, self.folder, eos=(), speculator=EAGLE3 if self.head else MTP, head=self.head)


HEADS = {"specforge": "llama", "speculators": "mistral-window", "3.1": "deepseek-v2"}  # the form of a head -> its model


@pytest.fixture(scope="module", params=["glm4-moe", "deepseek-v3", "glm4-moe-lite", *HEADS])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param not in FORMS:
        return Made(folder, make_predicting_checkpoint(folder, request.param))
    model = make_checkpoint(folder / "model", **CASES[HEADS[request.param]])
    return Made(folder / "model", make_head(folder / "head", request.param, model), str(folder / "head"))


@pytest.fixture
def model(made: Made, runner: TorchRunner) -> Iterator[CpuModel]:
    model = made.load(runner)
    yield model
    model.release()


def prompt_of(request_id: int) -> list[int]:
    prompt: list[int] = np.random.default_rng(request_id).integers(2, VOCAB, 5 + 4 * request_id).tolist()
    return prompt


def test_drafts_are_those_of_transformers_parts(made: Made) -> None:
    """In steps that are recorded, and in others."""
    runner = make_runner(make_memory())
    with pytest.MonkeyPatch.context() as patch:
        for recorded in (True, False):
            if not recorded:
                patch.setattr(cpu_model, "MAX_RECORDED_ROWS", 0)
            model = made.load(runner)
            check_drafts(model, made.reference, {2: prompt_of(3), 5: prompt_of(7)})
            check_drafts(model, made.reference, {2: prompt_of(4), 5: prompt_of(6)}, edited=2)
            model.release()


def texts_of(model: CpuModel, speculator: str) -> tuple[dict[int, list[int]], int]:
    """Returns the outputs of REQUESTS, which run together, with a preemption on the way, and how many tokens were drafted."""
    spec = LoadModel(1, "tiny", "", "float32", "", 0, 30, 20, MAX_LEN, 8, [], speculator=speculator)
    kv = make_kv_cache(spec, model.kv_groups, ChunkPool(NUM_CHUNKS, CHUNK_BYTES, 20), BATCHED_TOKENS)
    limits = BatchLimits(8, MAX_LEN, BATCHED_TOKENS, (), "f", "float32")
    drafter = None if speculator == "none" else looked_up
    scheduler = BatchScheduler("tiny", kv, limits, drafter, spec.predicts)
    output: dict[int, list[int]] = {request_id: [] for request_id in REQUESTS}
    for request_id, params in REQUESTS.items():
        tokens = np.array(prompt_of(request_id), np.int32)
        scheduler.submit(BatchRequest(request_id, tokens, len(tokens), params))
    num_drafted = steps = 0
    while (step := scheduler.plan(steps, StepRoom(max_tokens=9 if steps % 3 else None))) is not None:
        steps += 1
        result = model.execute(step, scheduler.table)
        outcome = scheduler.finish_step(step, result.ids, result.bad)
        assert not outcome.bad, "it read what is not its own"
        if result.proposed is not None:
            scheduler.take_proposals(result.proposed.slots, result.proposed.counts, result.proposed.tokens)
        told = iter(outcome.ids)
        for request_id, count in zip(outcome.request_ids, outcome.counts or [1] * len(outcome.ids), strict=True):
            output[request_id] += [next(told) for _ in range(count)]
        num_drafted += sum(outcome.drafted)
        if steps == 12:
            scheduler.preempt_one()
        for group, memory in zip(kv.groups, model._kv, strict=True):
            memory.kv[group.pool._stack[: group.pool.num_free].astype(np.int64)] = torch.nan
    return output, num_drafted


def test_texts_are_those_without_drafts(model: CpuModel) -> None:
    plain, num_drafted = texts_of(model, "none")
    assert not num_drafted
    with_drafts, num_drafted = texts_of(model, MTP)
    assert with_drafts == plain
    assert num_drafted > 20


@pytest.mark.parametrize("made", ["glm4-moe", "specforge"], indirect=True)
def test_a_first_step_in_slices_is_seen(made: Made) -> None:
    """The first step computes a prompt while weights arrive, in more slices than one."""
    model = made.load(make_runner(make_memory()))
    gate = WeightGate(weight_layout(model.shape, "float32"))
    for begin, end, _ in parameter_places(weight_layout(model.shape, "float32")):
        gate.landed(begin, end)
    gate.open()
    table, text = make_table(groups=model.kv_groups), prompt_of(11)
    put(table, 3, text)
    step = replace(plan((3, 0, len(text))), to_propose=np.array([3], np.int32))
    result = model.execute_behind(gate, step, table, max_tokens=16)
    assert result.proposed is not None
    assert result.proposed.tokens[0].tolist() == made.reference.drafts([*text, *result.ids.tolist()], 3)[0]
    model.release()
