"""A constrained request waits after each of its tokens until that is lifted; the others do not."""

from __future__ import annotations

from tests.scheduler.batch.fake_model import Harness, expected_output
from tests.scheduler.batch.params import Params

PARAMS = Params(ignore_eos=True, max_tokens=20)


def test_a_held_row_is_left_out_and_the_others_go_on() -> None:
    harness = Harness()
    harness.submit(1, [5, 6, 7], PARAMS, constrained=True)
    harness.submit(2, [8, 9], PARAMS)
    first = harness.step()
    assert first is not None
    assert sorted(first.request_ids) == [1, 2]
    for _ in range(3):
        outcome = harness.step()
        assert outcome is not None
        assert outcome.request_ids == [2]
    harness.scheduler.hold(1, False)
    outcome = harness.step()
    assert outcome is not None
    assert sorted(outcome.request_ids) == [1, 2]
    harness.run()
    assert harness.output[2] == expected_output([8, 9], PARAMS, 64)
    assert len(harness.output[1]) == 2


def test_nothing_is_runnable_while_all_are_held() -> None:
    harness = Harness()
    harness.submit(1, [5, 6, 7], PARAMS, constrained=True)
    harness.step()
    assert not harness.scheduler.runnable
    assert harness.step() is None
    harness.scheduler.hold(1, False)
    assert harness.scheduler.runnable


def test_a_request_that_waits_for_a_slot_is_no_work_while_held_rows_have_all_slots() -> None:
    harness = Harness(max_sequences=2)
    harness.submit(1, [5, 6, 7], PARAMS, constrained=True)
    harness.submit(2, [5, 6, 7], PARAMS, constrained=True)
    harness.step()
    harness.submit(3, [8, 9], PARAMS)
    assert not harness.scheduler.runnable
    assert harness.step() is None
    assert harness.scheduler.abort(1)
    assert harness.scheduler.runnable
    outcome = harness.step()
    assert outcome is not None
    assert outcome.request_ids == [3]


def test_a_preempted_row_is_still_held_when_it_is_back() -> None:
    harness = Harness()
    harness.submit(1, [5, 6, 7], PARAMS, constrained=True)
    harness.step()
    assert harness.scheduler.preempt_one()
    for _ in range(3):
        assert harness.step() is None
    harness.scheduler.hold(1, False)
    assert harness.step() is not None


def test_let_go_while_it_waits() -> None:
    harness = Harness()
    harness.submit(1, [5, 6, 7], PARAMS, constrained=True)
    harness.step()
    assert harness.scheduler.preempt_one()
    harness.scheduler.hold(1, False)
    for _ in range(30):
        harness.step()
        harness.scheduler.hold(1, False)
    assert harness.output[1] == expected_output([5, 6, 7], PARAMS, 64)
    harness.check_no_leak()


def test_a_slot_is_not_held_for_its_next_request() -> None:
    harness = Harness(max_sequences=1)
    harness.submit(1, [5, 6, 7], PARAMS, constrained=True)
    harness.step()
    assert harness.scheduler.abort(1)
    harness.submit(2, [8, 9], PARAMS)
    harness.run()
    assert harness.output[2] == expected_output([8, 9], PARAMS, 64)
