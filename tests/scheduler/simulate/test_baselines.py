"""Each baseline's rule, told apart from the others by one swap; and the bound against every possible choice."""

from __future__ import annotations

import random
from functools import cache

import pytest

from scheduler.node.ledger import Size
from scheduler.simulate.bound import fewest_loads
from scheduler.simulate.compare import run_policy
from scheduler.simulate.trace import TraceRequest
from tests.scheduler.simulate.test_simulation import SETTINGS, node, trace


@pytest.mark.parametrize(
    ("policy", "victim"),
    [
        ("lru", "b"),  # used longest ago
        ("ollama", "a"),  # first by name
        ("clairvoyant", "a"),  # needed latest
    ],
)
def test_who_leaves(policy: str, victim: str) -> None:
    made = trace((0, "b"), (5, "a"), (10, "c"), (20, "b"), (30, "c"))
    missed = [one.missed for one in run_policy(policy, node(), made, SETTINGS).outcomes]
    assert missed[:3] == [True] * 3
    assert missed[3] == (victim == "b")


def test_clairvoyant_keeps_what_is_needed_next() -> None:
    made = trace((0, "a"), (5, "b"), (10, "c"), (20, "a"), (30, "b"))
    assert [one.missed for one in run_policy("clairvoyant", node(), made, SETTINGS).outcomes] == [True, True, True, False, True]


def test_ollama_holds_three_models_and_five_minutes() -> None:
    made = trace((0, "a"), (5, "b"), (10, "c"), (15, "d"), (20, "a"))
    assert run_policy("ollama", node("abcd", 4), made, SETTINGS).outcomes[4].missed  # the fourth sent it away though there was room
    outcomes = run_policy("ollama", node(), trace((0, "a"), (290, "a"), (592, "a")), SETTINGS).outcomes
    assert [one.missed for one in outcomes] == [True, False, True]


def test_a_busy_victim_drains() -> None:
    made = [TraceRequest(0.0, "a", 10, 501), TraceRequest(2.0, "b", 10, 11)]
    first, second = run_policy("lru", node(room_for=1), made, SETTINGS).outcomes
    assert first.finished_s == pytest.approx(1.11 + 5.0)
    assert second.submitted_s == pytest.approx(6.11 + 1.0)


def test_the_bound_is_the_best_of_all_choices() -> None:
    draw = random.Random(5)
    for _ in range(50):
        names = [draw.choice("abcde") for _ in range(12)]
        sizes = {name: Size(1, 1, 1) for name in "abcde"}
        room = draw.choice((2, 3))
        requests = [TraceRequest(float(at), name, 1, 1) for at, name in enumerate(names)]
        assert fewest_loads(requests, sizes, 2 * room + 1) == best(tuple(names), frozenset(), room)


@cache
def best(names: tuple[str, ...], resident: frozenset[str], room: int) -> int:
    if not names:
        return 0
    if names[0] in resident:
        return best(names[1:], resident, room)
    if len(resident) < room:
        return 1 + best(names[1:], resident | {names[0]}, room)
    return 1 + min(best(names[1:], resident - {victim} | {names[0]}, room) for victim in resident)


def test_the_bound_with_models_of_several_sizes() -> None:
    """Sending the large one away makes room for two, though one of the small ones is needed later."""
    sizes = {"large": Size(4, 0, 0), "s1": Size(2, 0, 0), "s2": Size(2, 0, 0), "x": Size(4, 0, 0)}
    names = ["s1", "s2", "large", "x", "s1", "large", "s2"]
    requests = [TraceRequest(float(at), name, 1, 1) for at, name in enumerate(names)]
    assert fewest_loads(requests, sizes, 8) == 5
