"""Several models with more to do than fits their turns: they pool them, neighbours wait no longer, what is too much queues."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from scheduler.batch.step_limits import MOST_TURNS, StepLimits, turns_of_step
from scheduler.batch.step_room import StepRoom
from scheduler.batch.turns import Turns
from tests.scheduler.batch.fake_model import Harness, Params

TURN_S = 0.010
FIXED_S, ROW_S = 0.011, 0.0005  # of a step: weights are read for 11 ms; a row or a prompt's token adds 0.5 ms


@dataclass
class Model:
    """Closed loops of requests: so many are there at a time, each of 3 tokens in and 20 out."""

    num_streams: int
    harness: Harness = field(default_factory=lambda: Harness(reserved_chunks=1024, max_sequences=64, max_num_batched_tokens=512))
    limits: StepLimits = field(default_factory=lambda: StepLimits(TURN_S, 2.0))
    backlogged: bool = False
    num_asked: int = 0
    num_tokens: int = 0
    step_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)

    def ask(self) -> None:
        scheduler = self.harness.scheduler
        while scheduler.num_running + len(scheduler.waiting) < self.num_streams:
            self.num_asked += 1
            self.harness.submit(self.num_asked, [1 + self.num_asked % 50, 2, 3], Params(max_tokens=20, ignore_eos=True))

    def gaps_s(self, after_s: float) -> list[float]:
        ends = [end_s for end_s in self.ended_s if end_s > after_s]
        return sorted(b - a for a, b in itertools.pairwise(ends))


def run(num_streams: list[int], seconds: float = 12.0, pooled: bool = True) -> list[Model]:
    """Models of one device, all busy, as the engine steps them."""
    models = {str(at): Model(number) for at, number in enumerate(num_streams)}
    turns, now = Turns(), 0.0
    for name in models:
        turns.add(name)
    while now < seconds:
        for model in models.values():
            model.ask()
        backlogged = [name for name, model in models.items() if model.backlogged] if pooled else ["one"]
        name = turns.next(list(models), backlogged)
        assert name is not None
        model = models[name]
        num_turns = turns_of_step(len(models), len(backlogged), model.backlogged)
        room = StepRoom(model.limits, num_turns, strict=turns.is_over)
        scheduler = model.harness.scheduler
        plan = scheduler.plan(0, room)
        assert plan is not None
        model.backlogged = room.backlogged
        took_s = FIXED_S + ROW_S * int(plan.num_new.sum())
        now += took_s
        turns.charge(name, took_s, model.limits.turns_s(num_turns) if num_turns else None)
        model.limits.note(plan, took_s)
        outcome = scheduler.finish_step(plan, *model.harness.model.execute(plan, scheduler.table))
        model.num_tokens += len(outcome.ids)
        model.step_s.append(took_s)
        model.ended_s.append(now)
    return list(models.values())


def test_a_step_takes_more_turns_only_where_several_have_more_to_do() -> None:
    assert turns_of_step(1, 1, True) == 0
    assert turns_of_step(3, 0, False) == 1
    assert turns_of_step(3, 1, True) == 1, "one model's flood is its own"
    assert turns_of_step(3, 2, False) == 1
    assert turns_of_step(3, 2, True) == 2
    assert turns_of_step(9, 9, True) == MOST_TURNS


@pytest.mark.parametrize("floods", [1, 2, 3])
def test_neighbours_of_floods_wait_as_long_as_for_a_turn_of_each(floods: int) -> None:
    models = run([1, *[40] * floods])
    quiet = models[0].gaps_s(2.0)
    turn_s = 1.25 * (FIXED_S + ROW_S)
    own_s = FIXED_S + ROW_S
    assert quiet[int(0.99 * len(quiet))] <= 1.3 * (own_s + floods * turn_s)


def test_two_floods_compute_more_in_turns_they_pool() -> None:
    apart, together = run([1, 40, 40], pooled=False), run([1, 40, 40])
    assert sum(model.num_tokens for model in together[1:]) > 1.8 * sum(model.num_tokens for model in apart[1:])
    for model in together[1:]:
        assert len(model.harness.scheduler.waiting) > 5, "the excess queues"
        assert max(model.step_s[50:]) <= 2 * 1.25 * (FIXED_S + ROW_S) + 8 * ROW_S


def test_a_single_flood_has_its_turn_and_no_more() -> None:
    quiet, flood = run([1, 40])
    assert max(flood.step_s[50:]) <= 1.25 * (FIXED_S + ROW_S) + 8 * ROW_S
    assert len(flood.harness.scheduler.waiting) > 30
    assert sum(quiet.step_s) < 0.6 * (sum(quiet.step_s) + sum(flood.step_s))


def test_shares_stay_equal_and_nobody_starves() -> None:
    models = run([1, 3, 40, 40])
    total_s = sum(sum(model.step_s) for model in models)
    for model in models:
        assert 0.2 <= sum(model.step_s) / total_s <= 0.3
        assert max(model.gaps_s(2.0)) <= 8 * 0.06
