"""Tokens proposed for masked sequences change how many steps a text takes, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batch.drafting import MOST_DRAFTED, Drafter
from scheduler.batch.plan import StepOutcome
from scheduler.batch.step_room import StepRoom
from tests.scheduler.batch.fake_model import STATE, VOCAB, Harness, expected_output
from tests.scheduler.batch.params import Params
from tests.scheduler.batch.test_batch_scheduler import prompt_of
from tests.scheduler.batch.test_drafting import knowing, limits_of


def propose(harness: Harness, request_id: int, text: list[int], sure: bool = True) -> None:
    tokens = np.array(text, np.int32)
    harness.scheduler.propose(request_id, tokens, np.full(len(text), sure), guessed=not sure)
    harness.scheduler.hold(request_id, False)


class Proposing:
    """A harness in which requests with a grammar are held after each step until they are proposed what follows: what is expected,
    with an error now and then."""

    def __init__(self, harness: Harness, accuracy: float, num: int = MOST_DRAFTED) -> None:
        self.harness, self._accuracy, self._num = harness, accuracy, num
        self._rng = np.random.default_rng(0)
        self.expected: dict[int, list[int]] = {}

    def submit(self, request_id: int, prompt: list[int], params: Params) -> None:
        self.expected[request_id] = expected_output(prompt, params, 64)
        self.harness.submit(request_id, prompt, params, constrained=request_id % 3 > 0)

    def step(self) -> StepOutcome | None:
        outcome = self.harness.step()
        for request_id in self.expected:
            if request_id % 3 and request_id in self.harness.scheduler:
                at = len(self.harness.output[request_id])
                right = self.expected[request_id][at : at + self._num]
                text = [token if self._rng.random() < self._accuracy else (token + 1) % VOCAB for token in right]
                propose(self.harness, request_id, text, sure=bool(self._rng.random() < 0.5))
        return outcome

    def run(self) -> None:
        for _ in range(2000):
            if self.step() is None and not self.harness.scheduler.num_running + self.harness.scheduler.num_waiting:
                return
        raise AssertionError("no end")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_texts_whatever_is_proposed(data: Any) -> None:
    accuracy = data.draw(st.floats(0, 1))
    drafter: Drafter | None = knowing(accuracy) if data.draw(st.booleans()) else None
    harness = Harness(max_sequences=6, reserved_chunks=data.draw(st.integers(5, 24)), drafter=drafter)
    proposing = Proposing(harness, accuracy)
    for request_id in range(1, data.draw(st.integers(2, 9))):
        params = Params(
            max_tokens=data.draw(st.integers(1, 30)),
            ignore_eos=data.draw(st.booleans()),
            stop_token_ids=range(0, 90, 17),
            logprobs=request_id % 2 - 1,
        )
        proposing.submit(request_id, prompt_of(data.draw(st.integers(1, 30)), request_id % 3), params)
    aborted = set()
    for request_id in data.draw(st.lists(st.sampled_from(sorted(proposing.expected)), max_size=2, unique=True)):
        for _ in range(data.draw(st.integers(0, 6))):
            proposing.step()
        if request_id not in harness.finish and harness.scheduler.abort(request_id):
            aborted.add(request_id)
        if data.draw(st.booleans()):
            harness.scheduler.preempt_one()
    proposing.run()
    for request_id, expected in proposing.expected.items():
        wanted = expected[: len(harness.output[request_id])] if request_id in aborted else expected
        assert harness.output[request_id] == wanted
    harness.check_no_leak()


def test_sure_tokens_save_steps_without_a_drafter() -> None:
    proposing = Proposing(Harness(max_sequences=16), 1.0)
    params = Params(ignore_eos=True, max_tokens=48)
    proposing.submit(1, prompt_of(5), params)
    proposing.run()
    assert proposing.harness.output[1] == proposing.expected[1]
    assert proposing.harness.num_steps < 15  # a block of four tokens at a time


def test_rows_with_log_probabilities_are_drafted_for() -> None:
    harness = Harness(drafter=knowing(1.0))
    params = Params(ignore_eos=True, max_tokens=40, logprobs=0)
    harness.submit(1, prompt_of(5), params)
    harness.run()
    assert harness.output[1] == expected_output(prompt_of(5), params, 64)
    assert harness.num_steps < 12


def test_masked_rows_have_only_what_is_proposed() -> None:
    harness = Harness(drafter=knowing(1.0))
    harness.submit(1, prompt_of(5), Params(ignore_eos=True, is_limited=True, max_tokens=12))
    harness.run()
    assert harness.num_steps == 12
    harness.check_no_leak()


def test_what_was_proposed_for_fewer_tokens_is_not_drafted() -> None:
    harness, params = Harness(), Params(ignore_eos=True, max_tokens=30, is_limited=True)
    harness.submit(1, prompt_of(5), params)
    harness.step()
    expected = expected_output(prompt_of(5), params, 64)
    propose(harness, 1, expected[1:9])
    harness.submit(2, prompt_of(9, 1), params)  # its prompt's chunk has no drafts beside it
    harness.step()
    assert len(harness.output[1]) == 2
    harness.step()
    assert len(harness.output[1]) == 3
    harness.run()
    assert harness.output[1] == expected


def test_nothing_is_drafted_where_states_cannot_go_back() -> None:
    harness = Harness(more_groups=[(STATE, 16, 8)], reserved_chunks=16)
    assert not harness.scheduler.drafts_masked
    harness.submit(1, prompt_of(5), Params(ignore_eos=True, is_limited=True))
    harness.step()
    assert harness.scheduler.guess(1) is None
    propose(harness, 1, [1, 2, 3])
    outcome = harness.step()
    assert outcome is not None
    assert not outcome.counts


def test_guesses_that_fail_are_asked_for_ever_more_rarely_and_sure_tokens_are_still_drafted() -> None:
    def wrong(tokens: np.ndarray, num: int) -> np.ndarray:
        return np.full(num, VOCAB, np.int32)

    harness = Harness(max_sequences=16, max_model_len=512, reserved_chunks=80, drafter=wrong)
    params = Params(ignore_eos=True, max_tokens=400, is_limited=True)
    expected = expected_output(prompt_of(5), params, 512)
    limits = limits_of(*[0.010 + 0.003 * rows for rows in range(16)])
    harness.submit(1, prompt_of(5), params)
    guesses, at = [], 0
    while (plan := harness.scheduler.plan(harness.num_steps, StepRoom(limits))) is not None:
        harness.num_steps += 1
        harness.deliver(harness.scheduler.finish_step(plan, *harness.model.execute(plan, harness.scheduler.table)))
        at = len(harness.output[1])
        guess = harness.scheduler.guess(1)
        if guess is not None:
            guesses.append(at)
            propose(harness, 1, guess.tolist(), sure=False)
        elif at % 3 == 0:
            propose(harness, 1, expected[at : at + 2])
    assert harness.output[1] == expected
    assert len(guesses) < 50
    assert harness.num_steps < 320
    assert harness.model.num_computed_tokens < 470  # 404 without drafts
