"""Long prompts are computed during a load in one pass over the layers, in slices that fit the work space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.contracts.steps import StepResult
from engine.cpu.batch import padded_rows
from engine.cpu.model import CpuModel
from engine.cpu.sliced import slices
from engine.memory.weight_gate import WeightGate
from engine.protocol import LoadDone, LoadStreams, Submit, TokensOut
from scheduler.batch.plan import BatchPlan
from tests.engine.first_step.bench import GREEDY, Bench


def computed_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that collects the number of tokens of each step that runs during a load."""
    told: list[int] = []
    execute = CpuModel.execute_behind

    def noted(model: CpuModel, gate: WeightGate, plan: BatchPlan, *rest: Any) -> StepResult:
        told.append(int(plan.num_new.sum()))
        return execute(model, gate, plan, *rest)

    monkeypatch.setattr(CpuModel, "execute_behind", noted)
    return told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_prompts_are_computed_in_slices(bench: Bench, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """With max_num_batched_tokens 64, two prompts of 100 tokens and one of 31 are computed in one step during the load if no other
    model steps. Their blocks can then be found as prefixes."""
    told = computed_at_once(bench, monkeypatch)
    random = np.random.default_rng(6)
    prompts = [random.integers(2, 211, length).tolist() for length in (100, 100, 31)]
    bench.load(dtype=dtype)
    bench.until(LoadDone)
    alone = []
    for number, prompt in enumerate(prompts):
        bench.submit(number + 1, prompt)
        alone += bench.until_answered(number + 1)
    bench.evict()
    bench.allow(0)
    bench.load(dtype=dtype)
    bench.until(LoadStreams)
    for number, prompt in enumerate(prompts):
        bench.engine._handle(Submit(number + 11, "m", prompt, GREEDY))
    bench.until_waits_for(1)
    bench.allow(99)
    assert bench.until_answered(11, 12, 13) == alone
    assert told == [231]
    bench.submit(14, prompts[0])
    assert bench.until_answered(14) == [alone[0]]
    cached = [message.cached for message in bench.channel.sent if isinstance(message, TokensOut) and message.cached]
    assert cached[0][14] >= 96


def test_beside_steps_of_others_a_first_step_is_like_any(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    told = computed_at_once(bench, monkeypatch)
    prompt = np.random.default_rng(6).integers(2, 211, 100).tolist()
    bench.load()
    bench.until(LoadDone)
    bench.submit(1, prompt)
    (alone,) = bench.until_answered(1)
    bench.evict()
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(2, prompt)
    with monkeypatch.context() as patched:
        patched.setattr(bench.engine.models, "busy", lambda: ["another"])
        bench.engine._start_first_steps()
    bench.until_waits_for(2)
    bench.allow(99)
    assert bench.until_answered(2) == [alone]
    assert told == [64]


@pytest.mark.parametrize("max_tokens", [7, 16, 24, 50, 64, 512])
def test_slices_hold_each_token_once_and_in_order(max_tokens: int) -> None:
    random = np.random.default_rng(max_tokens)
    for _ in range(20):
        num_rows = int(random.integers(1, 9))
        num_new = random.integers(1, 200, num_rows).astype(np.int32)
        num_computed = random.integers(0, 50, num_rows).astype(np.int32)
        slots = random.permutation(20)[:num_rows].astype(np.int32)
        plan = BatchPlan(3, "m", slots, num_computed, num_new, np.ones(num_rows, np.bool_))
        wanted = [
            (slot, first + at) for slot, first, count in zip(slots, num_computed, num_new, strict=True) for at in range(count)
        ]
        parts = slices(plan, max_tokens)
        sizes = [int(part.num_new.sum()) for part in parts]
        assert max(sizes) <= max_tokens
        assert len(set(sizes[:-1])) <= 1
        assert not any(part.samples.any() for part in parts)
        found = [
            (slot, first + at)
            for part in parts
            for slot, first, count in zip(part.slots, part.num_computed, part.num_new, strict=True)
            for at in range(count)
        ]
        assert found == wanted
        if max_tokens >= 8:  # the last slice with its padding must end within the padded whole
            begin = sum(sizes[:-1])
            assert all(padded_rows(size) == size for size in sizes[:-1])
            assert begin + padded_rows(sizes[-1]) <= padded_rows(sum(sizes))
