"""Tenants that want the same model: shares of its engine, bounds on its queue."""

from __future__ import annotations

from collections import Counter

from tests.scheduler.node.fake_node import FakeNode, facts


def loaded(**settings: object) -> FakeNode:
    """A model with 8 places (4 sequences, twice)."""
    node = FakeNode(**settings)  # type: ignore[arg-type]
    node.register(facts("m"))
    node.bring_up("m")
    assert node.state("m") == "ready"
    return node


def test_a_flood_waits_behind_itself() -> None:
    node = loaded()
    flood = [node.arrive("m", "flood") for _ in range(40)]
    assert sorted(node.running) == flood[:8]
    late = [node.arrive("m", "late") for _ in range(2)]
    node.finish(flood[0])
    node.finish(flood[1])
    assert sorted(node.running) == [*flood[2:8], *late]


def test_shares_go_by_weight() -> None:
    node = loaded()
    of = {}
    for _ in range(40):
        of[node.arrive("m", "small", weight=1.0)] = "small"
        of[node.arrive("m", "large", weight=3.0)] = "large"
    for _ in range(20):
        node.finish(min(node.running))
    assert Counter(of[each] for each in node.running) == {"large": 6, "small": 2}


def test_no_tenant_fills_the_queue() -> None:
    node = loaded(max_queued_per_model=256)
    node.register(facts("n", max_queued=10))
    first = [node.arrive("n", "a") for _ in range(30)]
    refused = [each for each in first if each in node.ends]
    assert len(refused) == 25
    refusal = node.refusals[refused[0]]
    assert (refusal.code, refusal.retry_after_s is not None) == ("queue_full", True)
    assert refusal.message == "5 requests of a wait for n; 5 may"
    assert node.arrive("n", "b") not in node.ends


def test_one_tenants_large_request_leaves_the_others_room_in_the_queue() -> None:
    node = FakeNode(up=False)
    node.register(facts("n", max_queued=10))
    node.arrive_whole("n", 100, "a")
    assert node.arrive("n", "a") in node.refusals
    assert [node.arrive("n", "b") in node.refusals for _ in range(6)] == [False] * 5 + [True]
    assert node.arrive("n", "c") in node.refusals, "10 count: 5 of a's and b's 5"


def test_the_bound_can_be_set() -> None:
    node = FakeNode(up=False, max_queued_per_tenant=3)
    node.register(facts("m"))
    assert sum(node.arrive("m", "a") in node.ends for _ in range(10)) == 7
    assert sum(node.arrive("m") in node.ends for _ in range(10)) == 0, "no keys, no tenants"


def test_a_crash_refuses_nobody_and_keeps_the_order() -> None:
    node = loaded()
    before = [node.arrive("m", "ab"[at % 2]) for at in range(12)]
    node.engine_down("cpu:0")
    assert not any(each in node.ends for each in before)
    assert [entry.request_id for entry in node.scheduler.queue()] == before
    node.engine_up("cpu:0")
    node.loaded("m")
    assert sorted(node.running) == before[:8]
