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
from engine.protocol import EAGLE3, MTP, SamplingParams
from loader.sizes.layout import weight_layout
from scheduler.batch.prompt_lookup import looked_up
from tests.engine.drafting_steps import CHUNK_BYTES, NUM_CHUNKS, check_drafts, prompt_of, texts_of
from tests.engine.eagle_checkpoint import FORMS, EagleReference, make_head
from tests.engine.model_bench import CASES, load, make_checkpoint, make_memory, make_runner, make_table, plan, put
from tests.engine.predictor_checkpoint import Reference, make_predicting_checkpoint

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


def test_texts_are_those_without_drafts(model: CpuModel) -> None:
    plain, num_drafted = texts_of(model, REQUESTS, None)
    assert not num_drafted
    with_drafts, num_drafted = texts_of(model, REQUESTS, looked_up, MTP)
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
