"""Co-hosted models share the device's time."""

from __future__ import annotations

import pytest

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
    turns = Turns(0.010)
    for model in models:
        turns.add(model)
    return turns


def test_equal_shares_for_unequal_steps() -> None:
    got = run(make("fast", "slow", "huge"), {"fast": 0.0007, "slow": 0.009, "huge": 0.140}, 60.0)
    for seconds in got.values():
        assert seconds == pytest.approx(20.0, abs=0.3)


def test_weights() -> None:
    turns = make("a", "b")
    turns.set_weight("a", 3.0)
    got = run(turns, {"a": 0.004, "b": 0.006}, 40.0)
    assert got["a"] == pytest.approx(30.0, abs=0.2)


def test_a_turn_is_several_steps() -> None:
    turns = make("a", "b")
    order = []
    for _ in range(20):
        model = turns.next(["a", "b"])
        assert model is not None
        turns.charge(model, 0.002)
        order.append(model)
    assert "".join(order) in ("aaaaabbbbb" * 2, "bbbbbaaaaa" * 2)


def test_a_turn_ends_when_the_rest_of_it_covers_less_than_half_a_step() -> None:
    turns = make("a", "b", "c")
    longest, current, before = 0.0, 0.0, ""
    for _ in range(600):
        model = turns.next(["a", "b", "c"])
        assert model is not None
        turns.charge(model, 0.009)
        current = current + 0.009 if model == before else 0.009
        longest, before = max(longest, current), model
    assert longest <= 0.018
    alone = make("a", "b")
    doubles = 0
    for _ in range(900):
        model = alone.next(["a", "b"])
        assert model is not None
        alone.charge(model, 0.009)
        doubles += model == before
        before = model
    assert doubles < 150


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
