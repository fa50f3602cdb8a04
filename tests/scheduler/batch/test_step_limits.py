"""How large steps may be: costs are learned, and chunk and batch follow them."""

from __future__ import annotations

import pytest

from scheduler.batch.step_costs import StepCosts
from scheduler.batch.step_limits import LEAST_CHUNK_TOKENS, StepLimits
from tests.scheduler.batch.fake_model import Harness, Params


def device_s(num_tokens: int) -> float:
    """A device that reads weights for 5 ms and computes 10 tokens a millisecond."""
    return 0.005 + 0.0001 * num_tokens


def learned(*sizes: int, rounds: int = 20) -> StepCosts:
    costs = StepCosts()
    for _ in range(rounds):
        for size in sizes:
            costs.note(size, device_s(size))
    return costs


def limits_of(turn_s: float, stretch: float, *sizes: int) -> StepLimits:
    return StepLimits(turn_s, stretch, learned(*sizes), learned(*sizes))


def test_nothing_is_known_at_first() -> None:
    costs = StepCosts()
    assert (costs.least(), costs.seconds(8), costs.tokens_within(1.0)) == (0.0, 0.0, 0)


def test_between_known_steps_cost_is_a_straight_line() -> None:
    costs = learned(8, 512)
    assert costs.seconds(100) == pytest.approx(device_s(100), rel=1e-6)
    assert costs.tokens_within(device_s(100)) == pytest.approx(100, abs=1)
    assert costs.seconds(1) == costs.least() == pytest.approx(device_s(8))
    assert costs.tokens_within(device_s(8) / 2) == 0


def test_larger_steps_than_known_are_found_soon_and_never_beyond_twice() -> None:
    costs, size, sizes = StepCosts(), 1, []
    for _ in range(40):
        costs.note(size, device_s(size))
        size = max(1, costs.tokens_within(0.015))
        sizes.append(size)
    assert max(device_s(size) for size in sizes) <= 2 * 0.015
    assert sizes[-20:] == [pytest.approx(100, abs=10)] * 20


def test_a_stall_is_soon_forgotten() -> None:
    costs = learned(8, 128)
    costs.note(8, 3.0)  # larger steps are known to cost less
    assert costs.seconds(8) <= device_s(128) + 1e-9
    costs.note(128, 3.0)
    assert costs.seconds(128) < 1.5 * device_s(128)


def test_when_all_steps_get_dearer_fewer_tokens_are_allowed() -> None:
    costs = learned(8, 64, 512)
    before = costs.tokens_within(0.020)
    for _ in range(10):  # long contexts: three times as dear, though only this size was seen so
        costs.note(64, 3 * device_s(64))
    assert costs.tokens_within(0.020) < before / 2
    for _ in range(20):
        costs.note(64, device_s(64))
    assert costs.tokens_within(0.020) == pytest.approx(before, rel=0.1)


def test_steps_that_decode_and_steps_with_prompts_are_told_apart() -> None:
    limits = StepLimits(0.010, 2.0)
    for _ in range(5):
        limits.note(8, 8, 0.006)
        limits.note(9, 64, 0.030)
    assert limits.decoding.seconds(8) == pytest.approx(0.006)
    assert limits.prompting.seconds(64) == pytest.approx(0.030)


def test_alone_and_with_nobody_decoding_prompts_know_no_limit() -> None:
    limits = limits_of(0.010, 2.0, 8, 128, 512)
    assert limits.max_prompt_tokens(0, 1, shared=False) is None
    assert limits_of(0.010, 0.0, 8).max_prompt_tokens(8, 1, shared=False) is None


def test_a_chunk_stretches_the_step_of_decoding_sequences_by_the_factor_at_most() -> None:
    limits = limits_of(0.001, 2.0, 8, 128, 512)
    chunk = limits.max_prompt_tokens(8, 1, shared=False)
    assert chunk is not None
    assert device_s(8 + chunk) == pytest.approx(2 * device_s(8), rel=0.02)
    # three times as many prompts as decoding sequences: they may take three times as long
    more = limits.max_prompt_tokens(8, 24, shared=False)
    assert more is not None
    assert device_s(8 + more) == pytest.approx(6 * device_s(8), rel=0.02)
    # where steps are short a turn's worth is allowed all the same
    chunk = limits_of(0.040, 2.0, 8, 128, 512).max_prompt_tokens(8, 1, shared=False)
    assert chunk is not None
    assert device_s(8 + chunk) == pytest.approx(0.040, rel=0.02)


def test_while_others_wait_batch_and_chunk_keep_within_a_turn() -> None:
    limits = limits_of(0.010, 2.0, 1, 8, 32, 128, 512)
    assert limits.max_rows() == pytest.approx(50, abs=1)
    chunk = limits.max_prompt_tokens(20, 1, shared=True)
    assert chunk is not None
    assert device_s(20 + chunk) <= 0.010 + 1e-9
    assert limits.max_prompt_tokens(0, 1, shared=True) == pytest.approx(50, abs=1)
    assert limits.max_prompt_tokens(200, 1, shared=True) == LEAST_CHUNK_TOKENS  # prompts go on, if slowly


def test_a_model_whose_every_step_is_longer_than_a_turn_still_batches() -> None:
    limits = limits_of(0.002, 2.0, 1, 4, 8, 32, 128)
    assert limits.max_rows() == pytest.approx(13, abs=2)  # for a quarter more than its cheapest step
    assert StepLimits(0.002, 2.0).max_rows() == 1


def test_no_more_rows_than_allowed_and_the_excess_queues() -> None:
    harness = Harness(reserved_chunks=64)
    for request_id in range(1, 9):
        harness.submit(request_id, [1, 2, 3], Params(max_tokens=20))
    for _ in range(6):
        plan = harness.scheduler.plan(0, None, 3)
        assert plan is not None
        assert len(plan.slots) <= 3
        harness.scheduler.finish_step(plan, *harness.model.execute(plan, harness.scheduler.table))
    assert harness.scheduler.num_running == 3
    assert len(harness.scheduler.waiting) == 5


def test_rows_that_ran_before_the_limit_take_turns() -> None:
    harness = Harness(reserved_chunks=64)
    for request_id in range(1, 7):
        harness.submit(request_id, [1, 2, 3], Params(max_tokens=40))
    harness.step()
    seen: set[int] = set()
    for _ in range(3):
        plan = harness.scheduler.plan(0, None, 2)
        assert plan is not None
        seen |= set(plan.slots.tolist())
        harness.scheduler.finish_step(plan, *harness.model.execute(plan, harness.scheduler.table))
    assert len(seen) == 6
