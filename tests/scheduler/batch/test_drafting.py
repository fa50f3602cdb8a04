"""Drafted tokens change how many steps a text takes, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batch.drafting import MOST_DRAFTED, Drafter
from scheduler.batch.plan import FINISH_LENGTH, FINISH_STOP, IntArray
from scheduler.batch.prompt_lookup import looked_up
from scheduler.batch.step_limits import StepLimits
from scheduler.batch.step_room import StepRoom
from tests.scheduler.batch.fake_model import BLOCK_TOKENS, VOCAB, Harness, expected_output, in_sight, next_token
from tests.scheduler.batch.params import Params
from tests.scheduler.batch.test_batch_scheduler import prompt_of
from tests.scheduler.batch.test_steps_ahead import AheadHarness


def knowing(accuracy: float, windows: tuple[int, ...] = (0,), seed: int = 0) -> Drafter:
    """A drafter that knows what the model will sample, and errs at each token with 1 - accuracy."""
    rng = np.random.default_rng(seed)

    def draft(tokens: IntArray, num: int) -> IntArray:
        text = tokens.tolist()
        for _ in range(num):
            token = next_token(in_sight(text, windows))
            text.append(token if rng.random() < accuracy else (token + 1) % VOCAB)
        return np.array(text[len(tokens) :], np.int32)

    return draft


def many_requests(harness: Harness, windows: tuple[int, ...] = (0,)) -> None:
    """Runs requests that end in all ways, and checks each one's text."""
    requests = {}
    for request_id in range(1, 13):
        params = Params(
            max_tokens=3 * request_id,
            ignore_eos=request_id % 3 == 0,
            stop_token_ids=range(0, 90, 11),
            min_tokens=2 * (request_id % 4),
        )
        requests[request_id] = prompt_of(3 + 2 * request_id, request_id % 5), params
        harness.submit(request_id, *requests[request_id])
    harness.run()
    for request_id, (prompt, params) in requests.items():
        assert harness.output[request_id] == expected_output(prompt, params, 64, windows=windows), request_id
        stopped = harness.output[request_id][-1] in (96, *params.stop_token_ids)
        assert harness.finish[request_id] == (FINISH_STOP if stopped else FINISH_LENGTH) or request_id % 3 == 0
    harness.check_no_leak()


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("window", [0, 6, -8])
def test_texts_are_those_without_drafts(accuracy: float, window: int) -> None:
    harness = Harness(max_sequences=6, window=window, reserved_chunks=24, drafter=knowing(accuracy, (window,)))
    many_requests(harness, (window,))


@pytest.mark.parametrize("accuracy", [0.3, 0.9])
def test_texts_are_those_without_drafts_where_steps_start_ahead(accuracy: float) -> None:
    harness = AheadHarness(1, max_sequences=6, reserved_chunks=24, drafter=knowing(accuracy))
    many_requests(harness)
    assert harness.num_waits > 0


def test_drafts_are_tried_again_while_steps_start_ahead() -> None:
    known, asked = knowing(1.0), []

    def late(tokens: IntArray, num: int) -> IntArray:
        asked.append(len(tokens))
        return known(tokens, num if len(asked) > 4 else 0)

    harness = AheadHarness(1, drafter=late)
    harness.submit(1, prompt_of(5), Params(ignore_eos=True, max_tokens=55))
    harness.run()
    assert harness.output[1] == expected_output(prompt_of(5), Params(ignore_eos=True, max_tokens=55), 64)
    assert len(asked) > 4
    assert harness.num_steps < 40


def test_no_step_waits_for_drafts_where_no_row_is_left_for_them() -> None:
    harness = AheadHarness(1, max_sequences=2, drafter=knowing(1.0))
    for request_id in (1, 2):
        harness.submit(request_id, prompt_of(5, request_id), Params(ignore_eos=True, max_tokens=30))
    harness.run()
    assert harness.num_waits == 0


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_texts_under_preemption_aborts_and_short_memory(data: Any) -> None:
    accuracy = data.draw(st.floats(0, 1))
    harness = Harness(max_sequences=5, reserved_chunks=data.draw(st.integers(5, 9)), drafter=knowing(accuracy))
    requests: dict[int, tuple[list[int], Params]] = {}
    for request_id in range(1, data.draw(st.integers(2, 9))):
        params = Params(max_tokens=data.draw(st.integers(1, 30)), ignore_eos=data.draw(st.booleans()))
        requests[request_id] = prompt_of(data.draw(st.integers(1, 30)), request_id % 3), params
        harness.submit(request_id, *requests[request_id])
    aborted = set()
    for request_id in data.draw(st.lists(st.sampled_from(sorted(requests)), max_size=2, unique=True)):
        for _ in range(data.draw(st.integers(0, 6))):
            harness.step()
        if request_id not in harness.finish and harness.scheduler.abort(request_id):
            aborted.add(request_id)
        if data.draw(st.booleans()):
            harness.scheduler.preempt_one()
    harness.run()
    for request_id, (prompt, params) in requests.items():
        expected = expected_output(prompt, params, 64)
        if request_id in aborted:
            expected = expected[: len(harness.output[request_id])]
        assert harness.output[request_id] == expected
    harness.check_no_leak()


def test_drafts_that_hold_save_steps() -> None:
    plain, drafting = Harness(), Harness(drafter=knowing(1.0))
    for harness in (plain, drafting):
        harness.submit(1, prompt_of(5), Params(ignore_eos=True, max_tokens=40))
        harness.run()
    assert drafting.output == plain.output
    assert drafting.num_steps <= plain.num_steps // 3


def test_a_bad_row_fails_its_sequence_and_no_other() -> None:
    harness = Harness(drafter=knowing(1.0))
    for request_id in (1, 2):
        harness.submit(request_id, prompt_of(5, request_id), Params(ignore_eos=True, max_tokens=30))
    harness.step()
    plan = harness.scheduler.plan(9)
    assert plan is not None
    assert plan.drafted
    ids, bad = harness.model.execute(plan, harness.scheduler.table)
    bad[np.flatnonzero(plan.slots == plan.slots[0])[1]] = True  # its first drafted token's
    outcome = harness.scheduler.finish_step(plan, ids, bad)
    harness.deliver(outcome)
    assert (outcome.bad, outcome.request_ids) == ([1], [2])
    harness.run()
    assert harness.output[2] == expected_output(prompt_of(5, 2), Params(ignore_eos=True, max_tokens=30), 64)
    harness.check_no_leak()


def test_a_step_has_no_more_rows_than_the_model_has_slots() -> None:
    harness = Harness(max_sequences=4, drafter=knowing(1.0))
    for request_id in range(1, 5):
        harness.submit(request_id, prompt_of(5, request_id), Params(ignore_eos=True, max_tokens=4 + 8 * (request_id > 2)))
    most = 0
    while (plan := harness.scheduler.plan(harness.num_steps)) is not None:
        most = max(most, len(plan.slots) if plan.all_decode or plan.drafted else 0)
        harness.num_steps += 1
        harness.deliver(harness.scheduler.finish_step(plan, *harness.model.execute(plan, harness.scheduler.table)))
    assert most == 4


def test_a_prediction_is_looked_up_like_the_text() -> None:
    params = Params(ignore_eos=True, max_tokens=40)
    prompt, expected = prompt_of(5), expected_output(prompt_of(5), Params(ignore_eos=True, max_tokens=40), 64)
    edited = [*expected[:12], 91, 92, 93, *expected[12:]]  # parts of it come, others do not
    steps = []
    for prediction in ([], edited):
        harness = Harness(drafter=looked_up)
        harness.submit(1, prompt, params, prediction=np.array(prediction, np.int32))
        harness.run()
        assert harness.output[1] == expected
        steps.append(harness.num_steps)
        assert not harness.scheduler._drafts._predictions  # type: ignore[union-attr]
    assert steps[1] < steps[0] / 2


# ---- how many


def limits_of(*costs_s: float) -> StepLimits:
    """Limits that have seen steps of 1, 2, ... rows take so long."""
    limits = StepLimits(turn_s=0.1, stretch=2.0)
    for _ in range(4):
        for rows, seconds in enumerate(costs_s, 1):
            limits.decoding.note(rows, seconds, (0.0,))
    return limits


@pytest.mark.parametrize(
    ("costs_s", "worths", "num"),
    [
        ((0.010, 0.010, 0.010, 0.010), (0.9, 0.8, 0.1), 3),  # more rows cost nothing
        ((0.010, 0.020, 0.030, 0.040), (0.9, 0.8, 0.7), 0),  # they cost what they give
        ((0.010, 0.012, 0.014, 0.030), (0.9, 0.8, 0.7), 2),
        ((0.010, 0.018, 0.018, 0.018), (0.6, 0.5, 0.4), 3),  # one alone would not pay
    ],
)
def test_as_many_tokens_are_drafted_as_pay(costs_s: tuple[float, ...], worths: tuple[float, ...], num: int) -> None:
    assert limits_of(*costs_s).worth_drafting(1, 0.0, worths, turns=0) == num


def test_drafts_keep_within_the_turn() -> None:
    limits = limits_of(0.09, 0.09, 0.12, 0.12)
    assert limits.worth_drafting(1, 0.0, (0.9, 0.9, 0.9), turns=0) == 3
    assert limits.worth_drafting(1, 0.0, (0.9, 0.9, 0.9), turns=1) == 1


def test_sizes_that_have_not_run_are_tried() -> None:
    limits = StepLimits(turn_s=0.1, stretch=2.0)
    assert limits.worth_drafting(1, 0.0, (0.9,), turns=0) == 0, "nothing is known"
    for _ in range(4):
        limits.decoding.note(1, 0.010, (0.0,))
    assert limits.worth_drafting(1, 0.0, (0.9, 0.8, 0.7), turns=0) > 0
    for rows in (2, 3, 4):
        for _ in range(4):
            limits.decoding.note(rows, 0.010 * rows, (0.0,))
    assert limits.worth_drafting(1, 0.0, (0.9, 0.8, 0.7), turns=0) == 0, "they turned out to cost too much"


def test_a_sequence_whose_drafts_fail_is_left_alone_ever_longer() -> None:
    asked = []

    def wrong(tokens: IntArray, num: int) -> IntArray:
        asked.append(len(tokens))
        return np.full(num, VOCAB, np.int32)

    harness = Harness(max_sequences=16, max_model_len=1024, reserved_chunks=80, drafter=wrong)
    limits = limits_of(*[0.010 + 0.003 * rows for rows in range(16)])
    harness.submit(1, prompt_of(5), Params(ignore_eos=True, max_tokens=900))
    while (plan := harness.scheduler.plan(harness.num_steps, StepRoom(limits))) is not None:
        harness.num_steps += 1
        harness.deliver(harness.scheduler.finish_step(plan, *harness.model.execute(plan, harness.scheduler.table)))
    assert len(harness.output[1]) == 900
    assert len(asked) < 60
    assert harness.model.num_computed_tokens < 1000  # 904 without drafts


# ---- prompt lookup


@pytest.mark.parametrize(
    ("text", "num", "drafted"),
    [
        ("abcdexabc", 3, "dex"),
        ("abcdexabc", 8, "dexabcde"),  # the text ends: what repeats goes on
        ("abcxabcyabc", 2, "ya"),  # the latest of places that agree equally far
        ("zabcxqabcyabzabc", 1, "x"),  # the place that agrees furthest, though a later one agrees, too
        ("aaaa", 5, "aaaaa"),
        ("abababab", 5, "ababa"),
        ("abcdefga", 3, ""),  # one token alone says little
        ("abcdef", 3, ""),
        ("a", 3, ""),
        ("aa", 2, ""),
        ("aaa", 2, "aa"),
    ],
)
def test_prompt_lookup(text: str, num: int, drafted: str) -> None:
    tokens = np.array([ord(letter) for letter in text], np.int32)
    assert "".join(map(chr, looked_up(tokens, num).tolist())) == drafted


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, MOST_DRAFTED))
def test_prompt_lookup_finds_the_longest_match(text: list[int], num: int) -> None:
    def agreement(end: int) -> int:
        return next((back for back in range(8) if back > end or text[end - back] != text[len(text) - 1 - back]), 8)

    ends = range(len(text) - 1)
    best = max((agreement(end) for end in ends), default=0)
    drafted = looked_up(np.array(text, np.int32), num).tolist()
    if best < 2:
        assert drafted == []
    else:
        at = max(end for end in ends if agreement(end) == best) + 1
        expected = list(text)
        for _ in range(num):
            expected.append(expected[at])
            at += 1
        assert drafted == expected[len(text) :]


def test_block_boundaries_do_not_stop_drafts() -> None:
    harness = Harness(drafter=knowing(1.0))
    harness.submit(1, prompt_of(BLOCK_TOKENS - 1), Params(ignore_eos=True, max_tokens=50))
    harness.run()
    assert harness.num_steps < 50 / BLOCK_TOKENS + 4
