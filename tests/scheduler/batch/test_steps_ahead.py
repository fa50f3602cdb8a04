"""A step that is planned before the last one's tokens are known gives the same texts as one after the other."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batch.plan import BatchPlan, IntArray, StepOutcome
from scheduler.batch.steps_ahead import TokensNeeded
from tests.scheduler.batch.fake_model import Harness, Proposed, expected_output
from tests.scheduler.batch.params import Params
from tests.scheduler.batch.scripts import SCRIPT_MEMORY, Script, UnderWayHarness, run_script, scripts
from tests.scheduler.batch.test_batch_scheduler import prompt_of


class AheadHarness(UnderWayHarness):
    """depth: steps that are started before the first is read. The model is a device: it has what was sampled, the host does not.
    bad: requests whose next token's logits are not finite."""

    def __init__(self, depth: int, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.depth = depth
        self.under_way: deque[tuple[BatchPlan, IntArray, np.ndarray, Proposed | None]] = deque()
        self.device_tokens = np.zeros_like(self.scheduler.table.tokens)
        self.num_waits = 0
        self.bad: set[int] = set()

    def step(self, max_prompt_tokens: int | None = None) -> StepOutcome | None:
        """Starts a step if one can be, and takes in the oldest if more than `depth` are under way or none could be started."""
        try:
            plan = self.scheduler.plan(self.num_steps)
        except TokensNeeded:
            assert self.under_way
            self.num_waits += 1
            plan = None
        if plan is not None:
            self.num_steps += 1
            self.launch(plan)
        if self.under_way and (plan is None or len(self.under_way) > self.depth):
            return self.read()
        return StepOutcome([], []) if plan is not None else None

    def launch(self, plan: BatchPlan) -> None:
        table = self.scheduler.table
        computed, total = table.num_computed.copy(), table.num_tokens.copy()
        for slot, first, num_new in zip(plan.slots, plan.num_computed, plan.num_new, strict=True):
            known = first + 1 if plan.drafted else table.num_tokens[slot]
            self.device_tokens[slot, :known] = table.tokens[slot, :known]
            if not plan.drafted:  # else nothing is under way: the table has all
                computed[slot], total[slot] = first, max(known, first + num_new)
        seen = replace(table, tokens=self.device_tokens, num_computed=computed, num_tokens=total)
        ids, bad = self.model.execute(plan, seen)
        ends = plan.num_computed + plan.num_new
        self.device_tokens[plan.slots[plan.samples], ends[plan.samples]] = ids
        for row, slot in enumerate(plan.slots[plan.samples]):
            bad[row] = int(table.request_id[slot]) in self.bad
        proposed = self.model.propose(plan, seen, ids, self.scheduler.blocks.capacity)
        self.scheduler.start_step(plan)
        self.under_way.append((plan, ids, bad, proposed))

    def read(self) -> StepOutcome:
        return self.take_in(*self.under_way.popleft())

    def take_in_all(self) -> None:
        while self.under_way:
            self.read()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("window", [0, 6])
def test_many_sequences_with_stops_and_lengths(depth: int, window: int) -> None:
    harness = AheadHarness(depth, max_sequences=4, window=window, reserved_chunks=16)
    requests = {}
    for request_id in range(1, 17):
        params = Params(
            max_tokens=1 + request_id, ignore_eos=request_id % 3 == 0, stop_token_ids=range(0, 90, 7), min_tokens=request_id % 4
        )
        requests[request_id] = prompt_of(3 + 2 * request_id, request_id % 5), params
        harness.submit(request_id, *requests[request_id])
    harness.run()
    for request_id, (prompt, params) in requests.items():
        assert harness.output[request_id] == expected_output(prompt, params, 64, windows=(window,)), request_id
    harness.check_no_leak()


def test_no_step_is_in_vain_where_ends_are_known_before() -> None:
    plain, ahead = Harness(), AheadHarness(2)
    for harness in (plain, ahead):
        for request_id in range(1, 5):
            harness.submit(request_id, prompt_of(5, request_id), Params(ignore_eos=True, max_tokens=3 * request_id))
        harness.run()
    assert ahead.output == plain.output
    assert ahead.model.num_computed_tokens == plain.model.num_computed_tokens


def test_a_stop_found_late_costs_one_token_a_step_ahead() -> None:
    prompt = prompt_of(5)
    stop = expected_output(prompt, Params(ignore_eos=True), 64)[3]
    params = Params(ignore_eos=True, stop_token_ids=[stop], max_tokens=30)
    plain, ahead = Harness(), AheadHarness(1)
    for harness in (plain, ahead):
        harness.submit(1, prompt, params)
        harness.run()
    assert ahead.output == plain.output
    assert ahead.model.num_computed_tokens == plain.model.num_computed_tokens + 1
    ahead.check_no_leak()


@pytest.mark.parametrize(
    "params",
    [Params(logprobs=0), Params(repetition_penalty=1.5), Params(logit_bias={1: 2.0}), Params(prompt_logprobs=True)],
)
def test_what_the_host_must_see_first_is_waited_for(params: Params) -> None:
    harness = AheadHarness(1)
    harness.submit(1, prompt_of(4), replace(params, ignore_eos=True, max_tokens=6))
    while harness.step() is not None:
        assert len(harness.under_way) <= 1
    assert harness.num_waits == 6
    assert harness.output[1] == expected_output(prompt_of(4), Params(ignore_eos=True, max_tokens=6), 64)


def test_a_constrained_row_waits_for_what_may_follow() -> None:
    harness = AheadHarness(2)
    params = Params(ignore_eos=True, max_tokens=10)
    harness.submit(1, [5, 6, 7], params, constrained=True)
    harness.submit(2, [8, 9], params)
    for _ in range(200):
        harness.step()
        if len(harness.under_way) == 0:
            harness.scheduler.hold(1, False)
    for request_id, prompt in ((1, [5, 6, 7]), (2, [8, 9])):
        assert harness.output[request_id] == expected_output(prompt, params, 64)
    assert harness.num_waits
    harness.check_no_leak()


def test_preemption_waits_for_the_tokens_it_keeps() -> None:
    harness = AheadHarness(1, reserved_chunks=5)
    params = Params(ignore_eos=True, max_tokens=34)
    for request_id in range(1, 5):
        harness.submit(request_id, prompt_of(6, request_id), params)
    harness.step()
    with pytest.raises(TokensNeeded):
        harness.scheduler.preempt_one()
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert harness.num_waits > 0
    for request_id in range(1, 5):
        assert harness.output[request_id] == expected_output(prompt_of(6, request_id), params, 64)
    harness.check_no_leak()


def test_a_bad_row_ends_alone_also_where_its_next_step_runs() -> None:
    harness = AheadHarness(1)
    params = Params(ignore_eos=True, max_tokens=12)
    for request_id in (1, 2):
        harness.submit(request_id, prompt_of(5, request_id), params)
    for _ in range(4):
        harness.step()
    harness.bad.add(1)
    failed = []
    while (outcome := harness.step()) is not None:
        failed += outcome.bad
    assert failed == [1]
    assert harness.output[2] == expected_output(prompt_of(5, 2), params, 64)
    harness.check_no_leak()


def test_steps_end_in_the_order_in_which_they_were_started() -> None:
    harness = AheadHarness(2)
    harness.submit(1, prompt_of(5), Params(ignore_eos=True))
    harness.step()
    harness.step()
    with pytest.raises(RuntimeError, match="step 1 ends before step 0"):
        harness.scheduler.finish_step(*harness.under_way[1][:3])


@settings(max_examples=150, deadline=None)
@given(scripts(), st.sampled_from([0, 5]), st.integers(1, 3))
def test_any_schedule_gives_the_same_text(script: Script, window: int, depth: int) -> None:
    harness = AheadHarness(depth, **SCRIPT_MEMORY, max_sequences=5, window=window)
    run_script(harness, script)
