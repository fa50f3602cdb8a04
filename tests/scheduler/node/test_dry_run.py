"""What a dry run says is what happens; and asking changes nothing."""

from __future__ import annotations

import random

import pytest

from scheduler.node.views import LoadPlan
from tests.scheduler.node.fake_node import MIB, FakeNode, facts


def plan(node: FakeNode, name: str) -> LoadPlan:
    found = node.scheduler.plan_load(name, node.now)
    assert found is not None
    node.scheduler.validate()
    return found


def victims(found: LoadPlan) -> set[str]:
    return {one.name for each in found.devices if each.device == found.device for one in each.candidates if one.victim}


def test_fits_evicts_forces_waits() -> None:
    node = FakeNode()  # 100 MiB: two of 40
    node.register(*(facts(name) for name in "abc"))
    assert (plan(node, "a").verdict, plan(node, "a").device, plan(node, "a").source) == ("fits", "cpu:0", "disk")
    node.bring_up("a", "b")
    assert plan(node, "a").verdict == "there"
    found = plan(node, "c")
    assert (found.verdict, victims(found)) == ("evicts", {"a"})
    assert found.reason == "cpu:0: a would leave"
    assert found.devices[0].needed_bytes == 44 * MIB
    node.arrive("a")
    assert victims(plan(node, "c")) == {"b"}
    node.arrive("b")
    found = plan(node, "c")
    assert (found.verdict, len(victims(found))) == ("waits", 0)
    assert {one.reason for one in found.devices[0].candidates} == {"stays: busy, and came a short while ago"}
    node.now += 2.1
    found = plan(node, "c")
    assert (found.verdict, len(victims(found))) == ("forces", 1)
    assert {one.reason for one in found.devices[0].candidates} == {"leaves: busy, made to", "stays: busy"}
    node.command("pin", "a")
    node.command("pin", "b")
    found = plan(node, "c")
    assert found.verdict == "refused"
    assert "pinned models (a, b)" in found.reason


def test_no_device_and_never() -> None:
    node = FakeNode(up=False)
    node.register(facts("a"), facts("huge", weights_mib=400))
    assert plan(node, "a").verdict == "waits"
    assert "no engine is up" in plan(node, "a").reason
    assert plan(node, "huge").verdict == "refused"
    assert "too little" in plan(node, "huge").reason
    assert node.scheduler.plan_load("nobody", node.now) is None
    assert node.scheduler.plan_room("cpu:9", 1, node.now) is None


def test_room() -> None:
    node = FakeNode()
    node.register(*(facts(name, weights_mib=20) for name in "abc"))
    node.bring_up("a", "b", "c")  # 24 MiB each, 4 of work space: 24 are free
    node.now += 10
    node.finish(node.arrive("a"))

    def leaving(mib: int) -> list[str] | None:
        found = node.scheduler.plan_room("cpu:0", mib * MIB, node.now)
        assert found is not None
        return None if found.verdict == "waits" else sorted(one.name for one in found.candidates if one.victim)

    assert leaving(24) == []
    assert leaving(25) == ["b"]
    assert leaving(60) == ["b", "c"]
    assert leaving(96) == ["a", "b", "c"]
    assert leaving(97) is None
    node.arrive("a")
    assert leaving(96) is None


@pytest.mark.parametrize("seed", range(4))
def test_a_load_does_what_was_said(seed: int) -> None:
    draw = random.Random(seed)
    node = FakeNode({"cpu:0": 100, "cpu:1": 80})
    names = [f"m{index}" for index in range(8)]
    node.register(*(facts(name, weights_mib=draw.randrange(10, 50)) for name in names))
    num_evicting = 0
    for _ in range(80):
        node.now += draw.random() * 20
        name = draw.choice(names)
        said = plan(node, name)
        assert plan(node, name) == said
        before = len(node.scheduler.history())
        node.arrive(name)
        begun = [one for one in node.scheduler.history()[before:] if one.model == name]
        if said.verdict in ("fits", "evicts"):
            assert begun[0].device == said.device
            assert {victim.name for victim in begun[0].victims} == victims(said)
            scores = {one.name: one.score for each in said.devices for one in each.candidates}
            assert all(victim.score == scores[victim.name] for victim in begun[0].victims)
            num_evicting += said.verdict == "evicts"
        else:
            assert not begun
        if draw.random() < 0.8:
            node.finish_all()
    assert num_evicting > 5


def test_history() -> None:
    node = FakeNode()
    node.register(*(facts(name) for name in "abc"))
    node.bring_up("a", "b")
    node.now += 5
    node.arrive("c")
    node.now += 1
    node.evicted()
    node.now += 2
    node.loaded("c", seconds=2.0)
    first, second, third = node.scheduler.history()
    assert (first.model, first.cause, first.outcome, first.source, first.victims) == ("a", "cli-1", "ready", "disk", ())
    assert second.model == "b"
    assert (third.model, third.cause, third.outcome, third.load_s, third.forced) == ("c", "req-1", "ready", 2.0, False)
    assert third.ended == third.begun + 3
    assert [(victim.name, victim.busy, victim.chunks) for victim in third.victims] == [("a", False, 22)]
    assert node.scheduler.history("a") == [first, third]
    assert node.scheduler.history("nobody") == []


def test_history_of_what_fails() -> None:
    node = FakeNode()
    node.register(facts("a"), facts("b"))
    node.arrive("a")
    node.load_fails("bad sector")
    node.arrive("b")
    node.engine_down("cpu:0")
    assert [one.outcome for one in node.scheduler.history()] == [
        "load failed: bad sector",
        "the engine of cpu:0 killed",
    ]


def test_history_is_bounded() -> None:
    node = FakeNode()
    node.register(facts("a"))
    for _ in range(300):
        node.command("load", "a")
        node.loaded()
        node.command("unload", "a")
        node.evicted()
    assert len(node.scheduler.history()) == 256
    assert node.scheduler.history()[-1].id == 300
