"""How large steps may be: chunk and batch follow what steps cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from scheduler.batch.plan import BatchPlan
from scheduler.batch.step_costs import class_tokens
from scheduler.batch.step_limits import CHUNK_STEP_TOKENS, NEARLY_FREE, PATIENT_STEPS, StepLimits
from scheduler.batch.step_room import LEAST_CHUNK_TOKENS, StepRoom
from scheduler.batch.tenant_time import TenantLoad
from tests.scheduler.batch.fake_model import Harness, Params

SIZES = (1, 8, 32, 128, 512)
PAIR_S = 1e-6


def plan_of(num_rows: int, chunk: int = 0, context: int = 0) -> BatchPlan:
    """num_rows that decode, and a chunk behind so many stored tokens."""
    num_new = np.array([1] * num_rows + [chunk] * (chunk > 0), np.int32)
    num_computed = np.array([100] * num_rows + [context] * (chunk > 0), np.int32)
    return BatchPlan(0, "m", np.arange(len(num_new), dtype=np.int32), num_computed, num_new, num_new == 1)


def device_s(num_tokens: int, pairs: float = 0.0) -> float:
    """A device that reads weights for 5 ms and computes 10 tokens a millisecond."""
    return 0.005 + 0.0001 * num_tokens + PAIR_S * pairs


def limits_of(turn_s: float, stretch: float, *sizes: int) -> StepLimits:
    limits = StepLimits(turn_s, stretch)
    for _ in range(20):
        for size in sizes:
            limits.note(plan_of(size), device_s(size))
            for context in (0, 200, 1000) if size > 1 else ():
                limits.note(plan_of(0, size, context), device_s(size, size * (context + size / 2)))
    return limits


def chunk_of(
    limits: StepLimits, num_rows: int, num_prompts: int = 1, context: int = 0, turns: int = 0, strict: bool = False
) -> int:
    """Tokens of the first of num_prompts long prompts beside num_rows that decode."""
    room = StepRoom(limits, turns, strict=strict)
    room.open(100_000, np.full(num_rows, 100, np.int32), [TenantLoad(num_rows, num_prompts)])
    return room.take(context, 10_000)


def test_steps_that_decode_and_steps_with_prompts_are_told_apart() -> None:
    limits = StepLimits(0.010, 2.0)
    for _ in range(5):
        limits.note(plan_of(8), 0.006)
        limits.note(plan_of(8, 56), 0.030)
    assert limits.decoding.seconds(8, (800.0,)) == pytest.approx(0.006)
    assert limits.prompting.seconds(64, (808.0, 56.0, 56 * 28.0)) == pytest.approx(0.030)


def test_what_a_step_is_expected_to_take_follows_its_kind_and_size() -> None:
    limits = StepLimits(0.010, 2.0)
    for _ in range(5):
        limits.note(plan_of(8), 0.006)
        limits.note(plan_of(8, 56), 0.030)
    assert limits.expected_s(plan_of(8)) == pytest.approx(0.006)
    assert limits.expected_s(plan_of(8, 56)) == pytest.approx(0.030)
    assert limits.expected_s(plan_of(64)) == 0.0, "as many tokens, of a kind that was not seen"


def test_alone_and_with_nobody_decoding_prompts_know_no_limit() -> None:
    assert chunk_of(limits_of(0.010, 2.0, *SIZES), 0) == 10_000
    assert chunk_of(limits_of(0.010, 0.0, 8), 8) == 10_000


def test_a_first_prompt_beside_decoding_sequences_begins_with_a_little() -> None:
    assert chunk_of(StepLimits(0.010, 2.0), 8) == LEAST_CHUNK_TOKENS


@pytest.mark.parametrize("context", [0, 100])
def test_a_chunk_stretches_the_step_of_decoding_sequences_by_the_factor_at_most(context: int) -> None:
    def cost_s(chunk: int) -> float:
        return device_s(8 + chunk, chunk * (context + chunk / 2))

    chunk = chunk_of(limits_of(0.001, 2.0, *SIZES), 8, context=context)
    assert cost_s(chunk) <= 1.1 * 2 * device_s(8) <= 1.4 * cost_s(chunk)
    # three times as many prompts as decoding sequences: they may take three times as long
    chunk = chunk_of(limits_of(0.001, 2.0, *SIZES), 8, 24, context)
    assert cost_s(chunk) <= 1.1 * 6 * device_s(8) <= 1.4 * cost_s(chunk)
    # where steps are short a turn's worth is allowed all the same
    chunk = chunk_of(limits_of(0.040, 2.0, *SIZES), 8, context=context)
    assert cost_s(chunk) <= 1.1 * 0.040 <= 1.4 * cost_s(chunk)


def test_a_long_context_leaves_room_for_fewer() -> None:
    limits = limits_of(0.001, 2.5, *SIZES)
    chunks = [chunk_of(limits, 8, context=context) for context in (0, 200, 1000)]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[-1] == LEAST_CHUNK_TOKENS < chunks[0], "prompts go on, if slowly"


def test_what_a_short_prompt_leaves_is_the_next_ones() -> None:
    limits = limits_of(0.001, 3.0, *SIZES)
    room = StepRoom(limits)
    room.open(512, np.full(8, 100, np.int32), [TenantLoad(8, 3)])
    first, second, third = room.take(0, 5), room.take(0, 500), room.take(0, 500)
    assert (first, third) == (5, 0)
    assert second > 20
    assert room.is_full
    assert device_s(13 + second) <= 1.1 * 3 * device_s(8)


def test_tokens_of_a_step_are_never_more_than_allowed() -> None:
    room = StepRoom()
    room.open(512, np.zeros(12, np.int32), [TenantLoad(12, 3)])
    assert (room.take(0, 300), room.take(0, 300), room.take(0, 300)) == (300, 200, 0)
    room = StepRoom(max_tokens=100)
    room.open(512, np.zeros(12, np.int32), [TenantLoad(12, 3)])
    assert (room.take(0, 60), room.take(0, 60), room.take(0, 60)) == (60, 40, 0)


def test_while_others_wait_batch_and_chunk_keep_within_a_turn() -> None:
    limits = limits_of(0.010, 2.0, *SIZES)
    assert limits.max_rows(512, 100.0) == 48
    assert limits.max_rows(6, 100.0) == 6
    assert device_s(20 + chunk_of(limits, 20, turns=1)) <= 0.010 + 1e-9
    assert 32 <= chunk_of(limits, 0, turns=1) <= 56
    assert chunk_of(limits, 200, turns=1) == 24, "the smallest, and what costs no more: steps of 208 and 224 tokens are one class"


def test_a_busy_model_finds_its_batch_from_one_row_on_though_a_turn_hardly_holds_one() -> None:
    limits, rows = StepLimits(0.010, 2.0), 1
    for _ in range(60):
        limits.note(plan_of(rows), 0.0112 + 0.00035 * rows)
        rows = limits.max_rows(32, 100.0)
    assert rows == 8, "14.0 of 14.4 ms"


@pytest.mark.parametrize(
    "wait_s",
    [lambda draw: 0.045, lambda draw: draw.uniform(0.0, 0.09), lambda draw: draw.choice((0.0, 0.09))],
    ids=["even", "uneven", "now and then"],
)
@pytest.mark.parametrize("seed", range(3))
def test_rows_share_a_wait_for_other_devices_however_uneven_it_is(wait_s: Callable[[random.Random], float], seed: int) -> None:
    """If waits were a part of the learned costs, the uneven ones would leave 4 to 12 rows of 40."""
    limits, draw, rows = StepLimits(0.020, 2.0), random.Random(seed), 1
    allowed = []
    for wanted in (min(40, 1 + step // 5) for step in range(600)):
        limits.note(plan_of(rows, context=100), 0.022 + 0.0004 * rows)
        limits.note_wait(wait_s(draw))
        rows = limits.max_rows(wanted, 100.0)
        allowed.append(rows)
    assert np.mean(allowed[200:]) >= 30
    assert limits.turns_s(1) == pytest.approx(NEARLY_FREE * (0.022 + limits.wait_s), rel=0.05)
    assert limits.expected_s(plan_of(1, context=100)) == pytest.approx(0.0224 + limits.wait_s, rel=0.1)


def test_a_wait_leaves_room_for_a_chunk() -> None:
    limits = limits_of(0.010, 2.0, *SIZES)
    chunk = chunk_of(limits, 0, turns=1)
    for _ in range(100):
        limits.note_wait(0.005)
    assert 16 <= chunk_of(limits, 0, turns=1) < chunk, "half of the turn is left"
    for _ in range(100):
        limits.note_wait(1.0)
    assert chunk_of(limits, 0, turns=1) > chunk, "a quarter of what a step waits is left"


def chunks_are_dear(turn_s: float) -> StepLimits:
    """A step with a prompt has 4 ms of its own."""
    limits = StepLimits(turn_s, 2.0)
    for _ in range(20):
        for rows in (1, 8, 16, 32, 64):
            limits.note(plan_of(rows), device_s(rows))
            limits.note(plan_of(rows, 8), chunk_step_s(rows + 8))
    return limits


def chunk_step_s(num_tokens: int) -> float:
    return 0.004 + device_s(class_tokens(num_tokens, CHUNK_STEP_TOKENS))


def test_rows_leave_room_for_a_prompts_smallest_chunk() -> None:
    limits = chunks_are_dear(0.012)
    assert limits.max_rows(64, 100.0) == 64
    rows = limits.rows_beside_prompt(64, 100.0, 1)
    assert 0.9 * 0.012 <= chunk_step_s(rows + LEAST_CHUNK_TOKENS) <= 1.05 * 0.012
    assert limits.rows_beside_prompt(64, 100.0, 2) == 64
    assert limits.rows_beside_prompt(4, 100.0, 1) == 4, "no more than there are"
    assert limits.rows_beside_prompt(64, 100.0, 0) == 64, "alone there are no turns"
    assert StepLimits(0.012, 2.0).rows_beside_prompt(64, 100.0, 1) == 64, "of chunks nothing is known"


def test_a_step_with_a_chunk_keeps_within_the_turn_that_its_rows_alone_would_fill() -> None:
    harness, limits = Harness(reserved_chunks=1024, max_sequences=64, max_num_batched_tokens=128), chunks_are_dear(0.012)
    for request_id in range(1, 41):
        harness.submit(request_id, [1 + request_id, 2], Params(max_tokens=40, ignore_eos=True))
    harness.step()
    harness.submit(41, list(range(30)), Params(max_tokens=20, ignore_eos=True))
    plans = []
    for _ in range(6):
        plan = harness.scheduler.plan(0, StepRoom(limits, turns=1))
        assert plan is not None
        plans.append(plan)
        harness.scheduler.finish_step(plan, *harness.model.execute(plan, harness.scheduler.table))
    chunked = [plan for plan in plans if plan.num_new.max() > 1]
    assert [int(plan.num_new.max()) for plan in chunked] == [8, 8, 8, 6], "the prompt goes on"
    for plan in chunked:
        assert chunk_step_s(int(plan.num_new.sum())) <= 1.05 * 0.012, "with all rows it were more"
    assert len(plans[-1].slots) == 41, "rows that a chunk leaves no room for are deferred, not queued"
    ran = np.bincount(np.concatenate([plan.slots for plan in chunked]), minlength=40)[:40]
    assert ran.max() - ran.min() <= 1, "by turns"


def test_more_to_do_is_what_a_step_leaves() -> None:
    """A short prompt that ends in this step is no reason for the next to take more turns."""
    limits = limits_of(0.010, 2.0, *SIZES)
    room = StepRoom(limits, turns=2)
    room.open(512, np.full(8, 100, np.int32), [TenantLoad(8, 1)])
    assert (room.take(0, 60), room.backlogged) == (60, False)
    room = StepRoom(limits, turns=2)
    room.open(512, np.full(8, 100, np.int32), [TenantLoad(8, 1)])
    assert room.take(0, 500) < 500
    assert room.backlogged


def test_where_the_smallest_chunk_stretches_a_step_too_far_it_may_as_well_be_a_little_larger() -> None:
    """8 rows take 10 ms; any chunk beside them adds 11, and 24 tokens cost hardly more than 8. Else a prompt goes on by 8."""
    limits = StepLimits(0.010, 2.0)
    for _ in range(20):
        limits.note(plan_of(8), 0.010)
        for chunk in (8, 24, 56, 312):
            limits.note(plan_of(8, chunk), 0.021 + 0.0001 * chunk)
    assert 24 <= chunk_of(limits, 8) <= 56
    only_long = StepLimits(0.010, 2.0)
    for _ in range(3):
        only_long.note(plan_of(8), 0.010)
        only_long.note(plan_of(0, 512), 0.090)
    assert chunk_of(only_long, 8) == LEAST_CHUNK_TOKENS, "of small chunks nothing is known"


def test_where_any_chunk_is_dear_it_may_as_well_be_larger() -> None:
    """A step with a prompt has 6 ms of its own: in chunks of 8 tokens a prompt would hold the others up the more often."""
    limits = StepLimits(0.010, 2.0)
    for _ in range(20):
        limits.note(plan_of(1), device_s(1))
        for chunk in (8, 16, 32, 128):
            limits.note(plan_of(1, chunk), 0.002 + chunk_step_s(1 + chunk))
    assert 24 <= chunk_of(limits, 1, turns=1) <= 40  # 15 ms, in place of 12 for 8
    assert limits.longest_s([TenantLoad(1, 1)], 100.0, 1) <= 2 * 0.010
    assert chunk_of(limits, 1, turns=1, strict=True) == CHUNK_STEP_TOKENS - 1, "others have waited for such a step just now"
    only_long = StepLimits(0.010, 2.0)
    for _ in range(3):
        only_long.note(plan_of(1), device_s(1))
        only_long.note(plan_of(0, 512), 0.5)
    assert only_long.longest_s([TenantLoad(1, 1)], 100.0, 1) == pytest.approx(0.010), "of small chunks nothing is known"


def test_turns_that_are_pooled_are_no_longer_than_turns_unless_steps_are() -> None:
    assert limits_of(0.010, 2.0, 1, 8, 32).turns_s(1) == pytest.approx(0.010)
    assert limits_of(0.010, 2.0, 1, 8, 32).turns_s(3) == pytest.approx(0.030)
    long = limits_of(0.004, 2.0, 1, 8, 32)
    assert long.turns_s(1) == pytest.approx(1.25 * device_s(1), rel=0.01)
    assert long.turns_s(3) == pytest.approx(3.25 * device_s(1), rel=0.01)


def test_batches_that_are_too_long_for_a_turn_get_smaller_though_no_smaller_one_is_known() -> None:
    limits, sizes = StepLimits(0.010, 2.0), [400]
    for _ in range(12):
        limits.note(plan_of(sizes[-1]), device_s(sizes[-1]))
        sizes.append(limits.max_rows(400, 100.0))
    assert sizes[1:4] == [224, 112, 56]
    assert 40 <= sizes[-1] <= 50


def test_a_model_whose_every_step_is_longer_than_a_turn_still_batches() -> None:
    limits = limits_of(0.002, 2.0, 1, 4, 8, 32, 128)
    assert limits.max_rows(512, 100.0) == pytest.approx(13, abs=2)  # for a quarter more than its cheapest step
    assert StepLimits(0.002, 2.0).max_rows(512, 100.0) == 1


def test_no_more_rows_than_allowed_and_the_excess_queues() -> None:
    harness = Harness(reserved_chunks=64)
    for request_id in range(1, 9):
        harness.submit(request_id, [1, 2, 3], Params(max_tokens=20))
    for _ in range(6):
        plan = harness.scheduler.plan(0, StepRoom(max_rows=3))
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
        plan = harness.scheduler.plan(0, StepRoom(max_rows=2))
        assert plan is not None
        seen |= set(plan.slots.tolist())
        harness.scheduler.finish_step(plan, *harness.model.execute(plan, harness.scheduler.table))
    assert len(seen) == 6


def test_the_head_of_the_queue_does_not_wait_for_streams_to_end() -> None:
    """It is let in beside as many sequences as a turn has room for, once enough steps have passed it over; both take turns then."""
    harness = Harness(reserved_chunks=64)
    joined = list[int]()
    for request_id in (1, 2):
        harness.submit(request_id, [1, 2, 3], Params(max_tokens=60, ignore_eos=True))
    for num_steps in range(PATIENT_STEPS + 20):
        before = harness.scheduler.num_running
        plan = harness.scheduler.plan(0, StepRoom(max_rows=1))
        assert plan is not None
        assert np.count_nonzero(plan.num_new == 1) <= 1
        joined += [num_steps] * (harness.scheduler.num_running - before)
        harness.deliver(harness.scheduler.finish_step(plan, *harness.model.execute(plan, harness.scheduler.table)))
    assert joined == [0, PATIENT_STEPS]
    assert [len(harness.output[request_id]) for request_id in (1, 2)] == [PATIENT_STEPS + 11, 10]
