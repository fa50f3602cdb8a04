"""Steps that pass through stages: several are under way, of different sequences, and give the same texts as one after the other.

Each stage has a model of its own: the first one runs a step when it is planned, the last one when its tokens are read. So whatever
the batch scheduler does between the two must leave alone what the step reads."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batch.plan import BatchPlan, IntArray, StepOutcome
from scheduler.batch.steps_ahead import TokensNeeded
from tests.scheduler.batch.fake_model import STATE, FakeModel, expected_output, next_token
from tests.scheduler.batch.params import Params
from tests.scheduler.batch.scripts import SCRIPT_MEMORY, Script, UnderWayHarness, run_script, scripts
from tests.scheduler.batch.test_batch_scheduler import prompt_of


class StagedHarness(UnderWayHarness):
    """Does what the engine of the last stage does: it starts steps until as many are under way as there are stages, and then reads
    the oldest."""

    def __init__(self, num_stages: int, **options: Any) -> None:
        super().__init__(num_stages=num_stages, **options)
        self.num_stages = num_stages
        self.last = FakeModel(np.full_like(self.model.arena, -1), self.model.groups)
        self.under_way: deque[tuple[BatchPlan, IntArray, np.ndarray]] = deque()
        self.most_under_way = 0

    def step(self, max_prompt_tokens: int | None = None) -> StepOutcome | None:
        try:
            plan = self.scheduler.plan(self.num_steps)
        except TokensNeeded:
            assert self.under_way
            plan = None
        if plan is not None:
            self.num_steps += 1
            self.launch(plan)
        if self.under_way and (plan is None or len(self.under_way) == self.num_stages):
            return self.read()
        return StepOutcome([], []) if plan is not None else None

    def launch(self, plan: BatchPlan) -> None:
        sampled_by_others = np.concatenate([np.zeros(0, np.int32), *(one.slots[one.samples] for one, _, _ in self.under_way)])
        assert not set(plan.slots.tolist()) & set(sampled_by_others.tolist()), "its last token is not known"
        ids, bad = self._executed(self.model, plan)
        self.scheduler.start_step(plan)
        self.under_way.append((plan, ids, bad))
        self.most_under_way = max(self.most_under_way, len(self.under_way))

    def read(self) -> StepOutcome:
        plan, ids, bad = self.under_way.popleft()
        again, _ = self._executed(self.last, plan)
        assert again.tolist() == ids.tolist(), "the stages saw different tokens"
        return self.take_in(plan, ids, bad, None)

    def _executed(self, model: FakeModel, plan: BatchPlan) -> tuple[IntArray, np.ndarray]:
        """Runs a step as a model does: where it begins says the plan, since the table counts no step under way."""
        table = self.scheduler.table
        computed = table.num_computed.copy()
        computed[plan.slots[::-1]] = plan.num_computed[::-1]  # of several rows of a sequence the first
        return model.execute(plan, replace(table, num_computed=computed))

    def take_in_all(self) -> None:
        while self.under_way:
            self.read()


def knows_next(tokens: IntArray, num: int) -> IntArray:
    """Drafts what follows, and errs at the third token."""
    text = tokens.tolist()
    drafted: list[int] = []
    for number in range(num):
        drafted.append(next_token(text + drafted) if number != 2 else 0)
    return np.array(drafted, np.int32)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_each_stage_has_a_step_of_its_share_of_the_sequences(num_stages: int) -> None:
    harness = StagedHarness(num_stages, reserved_chunks=64)
    for request_id in range(1, 9):
        harness.submit(request_id, prompt_of(3, request_id), Params(ignore_eos=True, max_tokens=20))
    rows = []
    while harness.step() is not None:
        rows += [len(harness.under_way[-1][0].slots)] if harness.under_way else []
    assert harness.most_under_way == num_stages
    assert rows[0] == 8, "the prompts come together"
    assert set(rows[num_stages + 1 : 30]) <= {-(-8 // num_stages), 8 - (num_stages - 1) * -(-8 // num_stages)}
    harness.check_no_leak()


def test_a_prompt_may_be_in_several_stages() -> None:
    harness = StagedHarness(3, reserved_chunks=64, max_num_batched_tokens=8)
    harness.submit(1, prompt_of(40), Params(ignore_eos=True, max_tokens=3))
    harness.step()
    harness.step()
    assert [one.num_computed.tolist() for one, _, _ in harness.under_way] == [[0], [8]]
    harness.run()
    assert harness.output[1] == expected_output(prompt_of(40), Params(ignore_eos=True, max_tokens=3), 64)
    harness.check_no_leak()


def test_one_sequence_is_in_one_step_at_a_time() -> None:
    harness = StagedHarness(2)
    harness.submit(1, prompt_of(5), Params(ignore_eos=True, max_tokens=12))
    harness.run()
    assert harness.most_under_way == 1
    assert harness.num_steps == 12


def test_what_the_host_must_see_first_waits_alone() -> None:
    """A row whose settings need its token on the host is in no step meanwhile; others are."""
    harness = StagedHarness(2, reserved_chunks=32)
    harness.submit(1, prompt_of(4), Params(ignore_eos=True, max_tokens=9, repetition_penalty=1.5, logprobs=2))
    harness.submit(2, prompt_of(4, 2), Params(ignore_eos=True, max_tokens=9))
    harness.run()
    assert harness.most_under_way == 2
    for request_id, kind in ((1, 0), (2, 2)):
        assert harness.output[request_id] == expected_output(prompt_of(4, kind), Params(ignore_eos=True, max_tokens=9), 64)


@settings(max_examples=150, deadline=None)
@given(scripts(), st.sampled_from([0, 5, STATE]), st.integers(2, 4), st.booleans(), st.sampled_from([8, 32]))
def test_any_schedule_gives_the_same_text(script: Script, window: int, num_stages: int, drafts: bool, step_tokens: int) -> None:
    options: dict[str, Any] = {"drafter": knows_next} if drafts and window != STATE else {}
    memory = {**SCRIPT_MEMORY, "max_num_batched_tokens": step_tokens}
    run_script(StagedHarness(num_stages, max_sequences=6, window=window, **memory, **options), script)
