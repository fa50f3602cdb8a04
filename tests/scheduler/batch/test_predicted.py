"""A model's own predictor changes how many steps a text takes, and nothing else. It drafts only where it has seen all of a
sequence.

The fake predictor fails a draft behind a token that it was not shown (fake_model.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batch.plan import BatchPlan, IntArray
from scheduler.batch.proposals import MOST_PAUSE, MOST_PROPOSED, RETRY_PLANS
from scheduler.batch.proposing_costs import ProposingCosts
from scheduler.batch.step_costs import StepCosts
from scheduler.batch.step_limits import StepLimits
from scheduler.batch.step_room import StepRoom
from tests.scheduler.batch.fake_model import BLOCK_TOKENS, Harness, expected_output
from tests.scheduler.batch.params import Params
from tests.scheduler.batch.test_batch_scheduler import prompt_of
from tests.scheduler.batch.test_drafting import many_requests
from tests.scheduler.batch.test_steps_ahead import AheadHarness

SEEN, TOKEN = 1 / 16, 1 / 12  # of a step of the same rows: what it costs to be shown it, and to draft a token for each sequence


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_texts_are_those_without_a_predictor(accuracy: float) -> None:
    harness = Harness(max_sequences=6, reserved_chunks=24, accuracy=accuracy)
    many_requests(harness)
    assert harness.model.num_proposed_tokens > 40


@pytest.mark.parametrize("accuracy", [0.3, 0.9])
@pytest.mark.parametrize("depth", [1, 2])
def test_texts_are_those_without_a_predictor_where_steps_start_ahead(accuracy: float, depth: int) -> None:
    harness = AheadHarness(depth, max_sequences=6, reserved_chunks=24, accuracy=accuracy)
    many_requests(harness)
    assert harness.model.num_proposed_tokens > 20
    assert harness.num_waits > 0


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_texts_under_preemption_aborts_short_memory_and_prefix_hits(data: Any) -> None:
    """With steps that the predictor does not see, too: of requests with log-probabilities, and where nothing has paid for long."""
    options: dict[str, Any] = {"max_sequences": 5, "reserved_chunks": data.draw(st.integers(5, 9))}
    options["accuracy"] = data.draw(st.floats(0, 1))
    harness = AheadHarness(data.draw(st.integers(1, 2)), **options) if data.draw(st.booleans()) else Harness(**options)
    proposals = harness.scheduler._drafts.proposals  # type: ignore[union-attr]
    assert proposals is not None
    requests: dict[int, tuple[list[int], Params]] = {}
    for request_id in range(1, data.draw(st.integers(2, 9))):
        params = Params(
            max_tokens=data.draw(st.integers(1, 30)),
            ignore_eos=data.draw(st.booleans()),
            logprobs=data.draw(st.sampled_from([-1, -1, 0])),
        )
        prompt = prompt_of(data.draw(st.integers(1, 24)), request_id % 3)
        if data.draw(st.booleans()):  # the next turn of a conversation
            prompt = (prompt + expected_output(prompt, params, 64))[:40]
        requests[request_id] = prompt, params
        harness.submit(request_id, *requests[request_id])
        if data.draw(st.booleans()):
            for _ in range(data.draw(st.integers(0, 30))):
                if data.draw(st.booleans()):
                    proposals._pause = proposals._paused = MOST_PAUSE
                harness.step()
    aborted = set()
    for request_id in data.draw(st.lists(st.sampled_from(sorted(requests)), max_size=2, unique=True)):
        for _ in range(data.draw(st.integers(0, 6))):
            harness.step()
        if isinstance(harness, AheadHarness):
            harness.take_in_all()
        if request_id not in harness.finish and harness.scheduler.abort(request_id):
            aborted.add(request_id)
        if data.draw(st.booleans()):
            harness.scheduler.preempt_one()
        if data.draw(st.booleans()):
            harness.compaction.gather(harness.scheduler, 2)
    harness.run()
    for request_id, (prompt, params) in requests.items():
        expected = expected_output(prompt, params, 64)
        if request_id in aborted:
            expected = expected[: len(harness.output[request_id])]
        assert harness.output[request_id] == expected
    harness.check_no_leak()


def test_drafts_that_hold_save_steps() -> None:
    harness = Harness(accuracy=1.0)
    harness.submit(1, prompt_of(5), Params(ignore_eos=True, max_tokens=50))
    harness.run()
    assert harness.num_steps <= 1 + 50 / (1 + MOST_PROPOSED) + 5


def test_what_does_not_fit_blocks_or_text_is_not_asked_for() -> None:
    """The predictor fails where it is asked for more (fake_model.FakeModel._drafts), whatever the length of the text."""
    for prompt_tokens in range(1, 2 * BLOCK_TOKENS):
        for max_tokens in range(1, 9):
            harness = Harness(reserved_chunks=2, accuracy=1.0)
            params = Params(ignore_eos=True, max_tokens=max_tokens)
            harness.submit(1, prompt_of(prompt_tokens), params)
            harness.run()
            assert harness.output[1] == expected_output(prompt_of(prompt_tokens), params, 64)


def leave_out(harness: Harness, request_id: int, num_steps: int = 3) -> None:
    """Has the model decode steps that the predictor does not see, as after a long time in which no draft was worth its cost."""
    proposals = harness.scheduler._drafts.proposals  # type: ignore[union-attr]
    assert proposals is not None
    harness.submit(request_id, prompt_of(9), Params(ignore_eos=True, max_tokens=num_steps + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposals, "_depth", lambda *args: 0)
        proposals._pause, proposals._paused = MOST_PAUSE, 2
        harness.run()
    proposals._pause = proposals._paused = 0


def test_a_sequence_with_unseen_tokens_is_not_drafted_for_until_they_are_computed_again() -> None:
    harness = Harness(accuracy=1.0)
    leave_out(harness, 1, 12)
    text = prompt_of(9) + harness.output[1]
    params = Params(ignore_eos=True, max_tokens=10)
    harness.submit(2, text[:20], params)  # blocks of the output are cached, and the predictor has not seen them
    harness.run()
    assert harness.cached[2] > 9
    assert not harness.model.num_proposed_tokens
    harness.submit(3, [*text[:8], 1], params)  # of the prompt it has seen all
    harness.run()
    assert harness.cached[3] == 8
    proposed = harness.model.num_proposed_tokens
    assert proposed > 0
    while harness.kv.groups[0].prefixes.num_unheld:
        harness.kv.groups[0].pool.put_free(np.array(harness.kv.groups[0].prefixes.give_up(1), np.int32))
    harness.submit(4, text[:20], params)
    harness.run()
    assert not harness.cached.get(4)
    assert harness.model.num_proposed_tokens > proposed
    for request_id in (2, 4):
        assert harness.output[request_id] == expected_output(text[:20], params, 64)


def test_a_preempted_sequence_is_drafted_for_again_unless_cached_tokens_of_it_were_not_seen() -> None:
    for seen in (True, False):
        harness = Harness(accuracy=1.0)
        proposals = harness.scheduler._drafts.proposals  # type: ignore[union-attr]
        assert proposals is not None
        params = Params(ignore_eos=True, max_tokens=40)
        harness.submit(1, prompt_of(9), params)
        harness.step()
        while len(harness.output[1]) < 9:
            if not seen:
                proposals._hole[:] = 9
            harness.step()
        harness.scheduler.preempt_one()
        proposed = harness.model.num_proposed_tokens
        harness.run()
        assert harness.output[1] == expected_output(prompt_of(9), params, 64)
        assert (harness.model.num_proposed_tokens > proposed) == seen


def test_keys_of_cached_holes_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.batch.proposals._MOST_KEYS", 4)
    harness = Harness(accuracy=1.0)
    leave_out(harness, 1, 40)
    assert len(harness.scheduler._drafts.proposals._holed) == 4  # type: ignore[union-attr]


def test_proposals_do_not_reach_another_sequence_in_their_slot() -> None:
    harness = AheadHarness(1, max_sequences=1, accuracy=1.0)
    params = Params(ignore_eos=True, max_tokens=20)
    harness.submit(1, prompt_of(5), params)
    harness.step()
    assert len(harness.under_way) == 1
    harness.scheduler.abort(1)
    harness.submit(2, prompt_of(5, 1), params)
    plan = harness.scheduler.plan(5)  # in the first one's slot, before its results are read
    assert plan is not None
    harness.launch(plan)
    harness.read()
    proposals = harness.scheduler._drafts.proposals  # type: ignore[union-attr]
    assert proposals is not None
    assert not proposals._counts.any()
    harness.run()
    assert harness.output[2] == expected_output(prompt_of(5, 1), params, 64)


def test_nothing_is_asked_for_where_no_row_is_left_for_it() -> None:
    harness = Harness(max_sequences=2, reserved_chunks=16, accuracy=1.0)
    for request_id in (1, 2):
        harness.submit(request_id, prompt_of(5, request_id), Params(ignore_eos=True, max_tokens=30))
    harness.run()
    assert harness.num_steps >= 30
    assert not harness.model.num_proposed_tokens


# ---- how many


def limits_of(step_s: float, row_s: float, seen_s: float = 0.0, token_s: float = 0.0) -> StepLimits:
    """Limits that know what steps cost, and the predictor behind them for any number of sequences."""
    limits = StepLimits(turn_s=10.0, stretch=2.0, decoding=StepCosts.known(lambda rows: step_s + row_s * rows, (0.0,)))
    for sequences in (1 << bit for bit in range(8)):
        limits.proposing.note(sequences, 1, seen_s, token_s)
    return limits


@pytest.mark.parametrize(
    ("chance", "row_s", "token_s", "num"),
    [
        (0.9, 0.0, 0.0, MOST_PROPOSED),  # nothing costs anything
        (0.9, 0.001, 0.001, MOST_PROPOSED),
        (0.6, 0.001, 0.001, 2),
        (0.3, 0.001, 0.001, 1),
        (0.1, 0.001, 0.001, 0),
        (0.5, 0.030, 0.001, 0),  # a row costs more than it gives
        (0.9, 0.001, 0.009, 0),
    ],
)
def test_depth_follows_from_chance_and_costs(chance: float, row_s: float, token_s: float, num: int) -> None:
    limits = limits_of(0.010, row_s, seen_s=0.0005, token_s=token_s)
    best = limits.worth_proposing(1, 1, 15, 0.0, chance, MOST_PROPOSED, turns=0)
    assert best == num

    def rate(number: int) -> float:
        expected = sum(chance**one for one in range(number + 1))
        return expected / (0.010 + row_s * (1 + number) + (0.0005 + token_s * number if number else 0.0))

    assert best == max(range(MOST_PROPOSED + 1), key=lambda number: (round(rate(number), 9), -number))


def test_depth_keeps_within_spare_rows_and_the_turn() -> None:
    limits = limits_of(0.010, 0.001)
    assert limits.worth_proposing(4, 4, 100, 0.0, 0.9, MOST_PROPOSED, turns=0) > 1
    assert limits.worth_proposing(4, 4, 4, 0.0, 0.9, MOST_PROPOSED, turns=0) == 1
    assert limits.worth_proposing(4, 4, 6, 0.0, 0.99, MOST_PROPOSED, turns=0) == 2  # half of the second ones are verified
    assert limits.worth_proposing(4, 4, 0, 0.0, 0.99, MOST_PROPOSED, turns=0) == 0
    assert limits.worth_proposing(8, 2, 4, 0.0, 0.99, MOST_PROPOSED, turns=0) == 2  # the others cannot be drafted for
    limits.turn_s = 0.0145
    assert limits.worth_proposing(1, 1, 100, 0.0, 0.99, MOST_PROPOSED, turns=1) == 3


def test_one_is_asked_for_while_costs_are_unknown() -> None:
    limits = StepLimits(turn_s=10.0, stretch=2.0)
    assert limits.worth_proposing(4, 4, 100, 0.0, 0.9, MOST_PROPOSED, turns=0) == 1
    assert limits.worth_proposing(4, 4, 0, 0.0, 0.9, MOST_PROPOSED, turns=0) == 0
    limits.proposing.note(1, 1, 1.0, 1.0)
    limits.forget()
    assert limits.proposing.seconds(1, 3) == 0.0


def test_costs_follow_what_was_measured_for_as_many_sequences() -> None:
    costs = ProposingCosts()
    costs.note(1, 0, 0.001, 0.0)
    costs.note(8, 2, 0.004, 0.012)
    assert costs.seconds(1, 2) == pytest.approx(0.001)  # a token's cost is not known there
    assert costs.seconds(9, 3) == pytest.approx(0.004 + 3 * 0.006)
    for _ in range(40):
        costs.note(12, 1, 0.008, 0.001)
    assert costs.seconds(8, 1) == pytest.approx(0.009, rel=0.01)


class Timed:
    """Streams of a model whose steps take a time that its scheduler learns: 10 ms, and row_s for each row. Its predictor takes
    `seen` of a step of the same rows to be shown it, and `token` of one of as many sequences to draft a token for each. Its tokens
    are a function of request and position. accuracy: of a drafted token. seconds: of all steps. unseen: steps it was left out
    of."""

    seen, token = SEEN, TOKEN

    def __init__(self, num_streams: int, accuracy: float, row_s: float = 0.0001, num_tokens: int = 400) -> None:
        self.limits = StepLimits(turn_s=1.0, stretch=2.0)
        sizes = {"max_sequences": 64, "max_model_len": 1024, "reserved_chunks": num_streams * 64, "max_num_batched_tokens": 512}
        self.harness = Harness(accuracy=accuracy, **sizes)  # type: ignore[arg-type]
        self.accuracy, self.seconds, self.unseen = accuracy, 0.0, 0
        self._num_streams, self._row_s, self._num_tokens = num_streams, row_s, num_tokens
        self._rng = np.random.default_rng(0)

    def cost(self, rows: int) -> float:
        return 0.010 + self._row_s * rows

    def rate(self, num_steps: int) -> float:
        """Runs so many steps; returns the tokens a second, as a multiple of what they are without a predictor."""
        before_s = self.seconds
        tokens = sum(self._step() for _ in range(num_steps))
        return tokens / self._num_streams * self.cost(self._num_streams) / (self.seconds - before_s)

    def _step(self) -> int:
        harness, scheduler = self.harness, self.harness.scheduler
        while scheduler.num_running + scheduler.num_waiting < self._num_streams:
            request_id = len(harness.output) + 1
            most = self._num_tokens if request_id > self._num_streams else self._num_tokens * request_id // self._num_streams
            harness.submit(request_id, prompt_of(2, request_id), Params(ignore_eos=True, max_tokens=max(2, most)))
        plan = scheduler.plan(harness.num_steps, StepRoom(self.limits))
        assert plan is not None
        harness.num_steps += 1
        slots, ends = plan.slots[plan.samples], (plan.num_computed + plan.num_new)[plan.samples]
        ids = self._tokens(slots, ends)
        proposed = None
        if plan.to_propose is not None:
            agrees = scheduler.table.tokens[slots, ends] == ids
            last = np.append(slots[1:] != slots[:-1], True)
            newest = [
                row
                for row in range(len(slots))
                if (last[row] or not agrees[row]) and (slots[:row] != slots[row])[~agrees[:row]].all()
            ]
            counts = plan.to_propose[plan.samples][newest]
            behind = ends[newest, None] + 1 + np.arange(counts.max(initial=0))
            drafted = self._tokens(slots[newest, None], behind)
            wrong = self._rng.random(drafted.shape) >= self.accuracy
            proposed = slots[newest], counts, np.where(wrong, drafted + 1, drafted)
        outcome = harness.take_in(plan, ids, np.zeros(len(ids), np.bool_), proposed)
        self._charge(plan)
        return len(outcome.ids)

    def _tokens(self, slots: IntArray, positions: IntArray) -> IntArray:
        requests = self.harness.scheduler.table.request_id[slots]
        return np.asarray((requests * 31 + positions * 17) % 89, np.int32)

    def _charge(self, plan: BatchPlan) -> None:
        seconds = self.cost(int(plan.num_new.sum()))
        self.limits.note(plan, seconds)
        self.seconds += seconds
        if plan.to_propose is None:
            self.unseen += 1
            return
        sequences, num = len(np.unique(plan.slots)), int(plan.to_propose.max())
        seen_s, drafting_s = self.seen * seconds, num * self.token * self.cost(sequences)
        if plan.all_decode:
            self.limits.proposing.note(sequences, num, seen_s, drafting_s)
        self.seconds += seen_s + drafting_s


@pytest.mark.parametrize("num_streams", [1, 32])
def test_hardly_anything_is_lost_where_nothing_holds(num_streams: int) -> None:
    timed = Timed(num_streams, accuracy=0.0)
    assert timed.rate(2000) >= 0.97
    assert timed.unseen > 1000


@pytest.mark.parametrize("num_streams", [1, 32])
def test_little_is_lost_where_a_predictor_takes_an_eighth_of_a_step(num_streams: int) -> None:
    timed = Timed(num_streams, accuracy=0.0)
    timed.seen = timed.token = 0.125
    assert timed.rate(400) >= 0.97


def test_a_predictor_that_is_too_slow_sees_nothing_until_it_is_measured_again() -> None:
    timed = Timed(2, accuracy=1.0)
    timed.seen, timed.token = 1.0, 1.2
    assert timed.rate(600) >= 0.98
    assert timed.unseen > 580
    timed.seen, timed.token = SEEN, TOKEN  # such as once its kernels are compiled
    timed.rate(RETRY_PLANS)
    assert timed.rate(1000) > 2


@pytest.mark.parametrize(("num_streams", "row_s"), [(1, 0.0001), (32, 0.0001), (4, 0.0003)])
def test_gains_are_nearly_what_costs_allow(num_streams: int, row_s: float) -> None:
    """At the best depth throughout, which does not change and is known from the first step on."""
    chance, timed = 0.7, Timed(num_streams, accuracy=0.7, row_s=row_s)
    plain_s = timed.cost(num_streams)

    def gain(depth: int) -> float:
        step_s = timed.cost(num_streams * (1 + depth)) * (1 + SEEN) + depth * TOKEN * plain_s
        return sum(chance**held for held in range(depth + 1)) * plain_s / step_s

    best = max(map(gain, range(1, MOST_PROPOSED + 1)))
    assert timed.rate(600) >= 0.92 * best
    assert num_streams > 1 or best > 1.9


def test_a_predictor_that_was_left_out_is_tried_again() -> None:
    timed = Timed(2, accuracy=0.0, num_tokens=60)
    timed.rate(600)
    unseen = timed.unseen
    assert unseen > 200
    timed.accuracy = 0.9
    timed.rate(1200)
    assert timed.rate(300) > 1.5
