"""Co-hosted models share the device's time, each waiting for the others as little as steps that are never broken off allow."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batch.turns import Turns


def run(turns: Turns, step_s: dict[str, float], total_s: float) -> dict[str, float]:
    """Device seconds each got while all were busy."""
    got = dict.fromkeys(step_s, 0.0)
    while sum(got.values()) < total_s:
        model = turns.next(list(step_s))
        assert model is not None
        turns.charge(model, step_s[model])
        got[model] += step_s[model]
    return got


def make(*models: str) -> Turns:
    turns = Turns()
    for model in models:
        turns.add(model)
    return turns


def test_equal_shares_for_unequal_steps() -> None:
    got = run(make("fast", "slow", "huge"), {"fast": 0.0007, "slow": 0.009, "huge": 0.140}, 60.0)
    for seconds in got.values():
        assert seconds == pytest.approx(20.0, rel=0.25)


def test_weights() -> None:
    turns = make("a", "b")
    turns.set_weight("a", 3.0)
    got = run(turns, {"a": 0.004, "b": 0.006}, 40.0)
    assert got["a"] == pytest.approx(30.0, rel=0.25)


def gaps(
    step_s: dict[str, float], num_steps: int = 3000, noise: float = 0.0, pooling: Collection[str] = ()
) -> dict[str, list[float]]:
    """Seconds from one step of a model to its next, while all are busy."""
    turns, rng, now = make(*step_s), random.Random(7), 0.0
    found: dict[str, list[float]] = {model: [] for model in step_s}
    last: dict[str, float] = {}
    for _ in range(num_steps):
        model = turns.next(list(step_s), pooling)
        assert model is not None
        seconds = step_s[model] * (1 + noise * rng.random())
        turns.charge(model, seconds)
        now += seconds
        if model in last:
            found[model].append(now - last[model])
        last[model] = now
    return {model: sorted(each) for model, each in found.items()}


def test_like_steps_alternate() -> None:
    turns, order = make("a", "b"), []
    for _ in range(26):
        model = turns.next(["a", "b"])
        assert model is not None
        turns.charge(model, 0.002)
        order.append(model)
    assert "".join(order[6:]) in ("ab" * 10, "ba" * 10)


def test_steps_near_the_budget_wait_for_one_step_of_each_other() -> None:
    """Whether they run a little under it or a little over; nobody sits out a round."""
    for each in (0.007, 0.0095, 0.011):
        for found in gaps({"a": each, "b": each, "c": each}, noise=0.1).values():
            assert found[int(0.98 * len(found))] <= 3 * 1.1 * each
            assert found[-1] <= 5 * 1.1 * each


def test_a_model_of_shorter_steps_has_its_share_as_more_of_them() -> None:
    found = gaps({"short": 0.007, "long": 0.0105, "longer": 0.0105}, noise=0.05)
    assert len(found["short"]) > 1.2 * len(found["long"])
    assert found["short"][int(0.98 * len(found["short"]))] <= 1.05 * (0.007 + 2 * 0.0105)
    assert found["longer"][int(0.98 * len(found["longer"]))] <= 1.05 * (2 * 0.007 + 2 * 0.0105)


def test_short_steps_come_between_the_long_ones() -> None:
    """Not all of a share in a row, and then nothing while everybody else has one."""
    found = gaps({"quiet": 0.012, "flood": 0.024, "other flood": 0.024}, noise=0.1)
    assert found["quiet"][int(0.95 * len(found["quiet"]))] <= 1.1 * (0.012 + 0.024)
    assert found["quiet"][-1] <= 1.1 * (0.012 + 2 * 0.024)


def test_between_two_steps_that_take_the_turns_of_several_everybody_else_has_one() -> None:
    """As measured: floods whose 32 rows take 14 ms, not the 20 of two turns, had two steps in a row in a tenth of the cases."""
    step_s, floods = {"quiet": 0.0092, "flood": 0.014, "other flood": 0.014}, ("flood", "other flood")
    once = 1.3 * (step_s["quiet"] + step_s["flood"])
    assert gaps(step_s, noise=0.3)["quiet"][-1] > once
    found = gaps(step_s, noise=0.3, pooling=floods)
    assert found["quiet"][-1] <= once
    assert abs(len(found["flood"]) - len(found["other flood"])) <= 2
    for flood in floods:
        assert found[flood][-1] <= 1.3 * (2 * step_s["quiet"] + 2 * step_s["flood"])


def test_who_is_ahead_of_its_share_waits_for_two_such_steps() -> None:
    step_s, floods = {"quiet": 0.012, "flood": 0.006, "other flood": 0.006}, ("flood", "other flood")
    found = gaps(step_s, pooling=floods)
    total_s = sum(len(found[model]) * seconds for model, seconds in step_s.items())
    assert len(found["quiet"]) * step_s["quiet"] <= 1.3 * total_s / 3
    assert found["quiet"][-1] <= 0.012 + 4 * 0.006


def test_all_that_pool_and_nobody_else_alternate() -> None:
    found = gaps({"a": 0.014, "b": 0.014}, noise=0.1, pooling=("a", "b"))
    assert found["a"][-1] <= 1.1 * 2 * 0.014


def test_a_step_beyond_its_turn_is_over_until_others_have_left_as_much_of_theirs() -> None:
    turns = make("a", "b", "c")
    told = []
    for model, seconds in (("a", 0.0125), ("b", 0.009), ("c", 0.008), ("a", 0.030), ("b", 0.009)):
        assert turns.next(["a", "b", "c"]) is not None
        turns.charge(model, seconds, 0.010)
        told.append(turns.is_over)
    assert told == [True, True, False, True, True]
    turns.charge("a", 0.030)
    assert not turns.is_over, "who is alone takes as long as it likes"


def test_many_short_steps_fit_between_two_long_ones() -> None:
    found = gaps({"short": 0.001, "long": 0.009})
    assert found["long"][-1] <= 0.009 + 0.011 + 1e-9
    assert found["short"][-1] <= 0.009 + 0.001 + 1e-9


@settings(deadline=None)
@given(st.lists(st.floats(0.0005, 0.2), min_size=2, max_size=8), st.lists(st.floats(0.25, 4.0), min_size=8, max_size=8))
def test_nobody_waits_longer_than_for_its_share_and_one_step_of_each_other(each: list[float], weights: list[float]) -> None:
    """From the end of a step to that of the next, in device time; and no share is more than a quarter above what is due."""
    step_s = {str(at): seconds for at, seconds in enumerate(each)}
    turns, now, last = make(*step_s), 0.0, dict.fromkeys(step_s, 0.0)
    got = dict.fromkeys(step_s, 0.0)
    total = sum(weights[: len(each)])
    for at, name in enumerate(step_s):
        turns.set_weight(name, weights[at])
    for _ in range(1000):
        name = turns.next(list(step_s))
        assert name is not None
        turns.charge(name, step_s[name])
        now += step_s[name]
        got[name] += step_s[name]
        shares = total / weights[int(name)]
        assert now - last[name] <= max(shares * step_s[name], 0.0) + sum(each) + 1e-9
        last[name] = now
    for at, name in enumerate(step_s):
        most = 1.25 * now * weights[at] / total + 2 * step_s[name]
        assert got[name] <= most + 1e-9


def test_who_comes_and_goes_takes_no_more_than_its_share() -> None:
    """As a model whose rows wait for their grammar's masks after each token."""
    turns, got = make("steady", "flapping"), {"steady": 0.0, "flapping": 0.0}
    for _ in range(2000):
        for busy in (["steady", "flapping"], ["steady"]):
            name = turns.next(busy)
            assert name is not None
            turns.charge(name, 0.01)
            got[name] += 0.01
    assert got["flapping"] <= 0.6 * sum(got.values())


def test_alone_it_runs_and_owes_nothing_later() -> None:
    turns = make("a", "b")
    for _ in range(1000):
        assert turns.next(["a"]) == "a"
        turns.charge("a", 0.5)
    got = run(turns, {"a": 0.01, "b": 0.01}, 10.0)
    assert got["a"] == pytest.approx(5.0, abs=0.6)


def test_idle_models_gather_no_credit() -> None:
    turns = make("a", "b", "c")
    run(turns, {"a": 0.01, "b": 0.01}, 20.0)
    got = run(turns, {"a": 0.01, "b": 0.01, "c": 0.01}, 9.0)
    assert got["c"] == pytest.approx(3.0, abs=0.1)


def test_nobody_busy_and_removed() -> None:
    turns = make("a", "b")
    assert turns.next([]) is None
    turns.remove("a")
    assert turns.next(["b"]) == "b"
    with pytest.raises(ValueError, match="weight"):
        turns.set_weight("b", 0.0)
