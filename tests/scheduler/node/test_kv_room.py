"""Idle weights become KV where requests wait in an engine for it, and come back when they are asked for."""

from __future__ import annotations

from scheduler.node import events
from tests.scheduler.node.fake_node import MIB, FakeNode, facts


def crowded(**settings: float) -> FakeNode:
    """`a` runs two requests; b and c, which are there too, have nothing to do, and b was used last. 100 MiB: 24 are left."""
    node = FakeNode(**settings)
    node.register(*(facts(name, 20) for name in "abc"))
    node.bring_up("a", "c", "b")
    node.now += 30
    node.finish(node.arrive("b"))
    node.arrive("a")
    node.arrive("a")
    assert node.lease["cpu:0"] == 12
    return node


def note(node: FakeNode, running_mib: int, waiting: int) -> None:
    kv_bytes = {"a": (running_mib * MIB, 0)}
    node.post(events.KVNoted, device="cpu:0", kv_bytes=kv_bytes, waiting={"a": waiting} if waiting else {})


def test_an_idle_model_leaves_for_kv() -> None:
    node = crowded()
    note(node, 27, 3)  # 24 MiB of the lease and 2 to 4 of its own
    (evict,) = node.evicts.values()
    assert (evict.model, evict.reason) == ("c", "kv")
    assert "becomes KV for a, where 3 requests wait" in node.view("c").reason
    note(node, 27, 3)
    assert len(node.evicts) == 1, "one at a time"
    node.evicted()
    assert node.state("c") == "cold"
    assert node.lease["cpu:0"] == 24, "in chunks"
    note(node, 27, 3)
    assert not node.evicts, "there is KV now"
    note(node, 51, 3)
    assert [one.model for one in node.evicts.values()] == ["b"]
    node.evicted()
    note(node, 75, 3)
    assert not node.evicts, "a itself is busy"
    request = node.arrive("c")
    node.loaded("c")
    assert request in node.running
    assert node.lease["cpu:0"] == 24


def test_nobody_leaves_while_kv_is_left_or_nobody_waits() -> None:
    node = crowded()
    note(node, 27, 0)
    note(node, 10, 3)
    assert not node.evicts


def test_an_idle_model_leaves_for_an_adapter() -> None:
    """Reserved KV is free, but an adapter takes nothing of it."""
    node = crowded()
    note(node, 1, 2)
    assert not node.evicts
    node.post(events.KVNoted, device="cpu:0", kv_bytes={"a": (MIB, 0)}, waiting={"a": 2}, without_room={"a": 1})
    (evict,) = node.evicts.values()
    assert (evict.model, evict.reason) == ("c", "kv")
    assert "becomes adapters for a, where 2 requests wait" in node.view("c").reason


def test_adapters_that_run_leave_less_for_kv() -> None:
    node = crowded()
    note(node, 12, 2)
    assert not node.evicts
    node.post(events.KVNoted, device="cpu:0", kv_bytes={"a": (12 * MIB, 0)}, waiting={"a": 2}, adapter_bytes=16 * MIB)
    (evict,) = node.evicts.values()
    assert (evict.model, evict.reason) == ("c", "kv")


def test_pinned_and_busy_models_stay() -> None:
    node = crowded()
    node.command("pin", "c")
    node.arrive("b")
    note(node, 27, 3)
    assert not node.evicts


def test_what_is_asked_for_more_often_than_it_is_worth_stays() -> None:
    """b and c take several seconds to load and are asked for often: on average more would wait for them than wait for KV."""
    node = crowded()
    for name in "bc":
        node.command("unload", name)
        node.evicted()
        node.arrive(name)
        node.loaded(name, seconds=18.0)
        for _ in range(200):
            node.now += 1 / 4
            node.arrive(name)
            node.finish(*(request for request in node.running if node.open.get(request) == name))
    note(node, 27, 1)
    assert not node.evicts
    note(node, 27, 20)
    assert node.evicts
