"""A model leaves when it has had no request for as long as its keep_alive says, and only then."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from scheduler.node import actions, events
from tests.scheduler.node.fake_node import MIB, FakeNode, facts


def served(node: FakeNode, name: str = "a") -> None:
    """A request has the model loaded, and ends at once."""
    request = node.arrive(name)
    node.loaded(name)
    node.finish(request)


def node_with(keep_alive_s: float = 60.0, **settings: int) -> FakeNode:
    node = FakeNode(**settings)
    node.register(facts("a", 20, keep_alive_s=keep_alive_s), facts("b", 20))
    return node


def test_an_idle_model_leaves_when_its_time_is_up() -> None:
    node = node_with(60.0)
    served(node)
    served(node, "b")
    assert node.view("a").leaves_at == node.now + 60
    assert node.view("b").leaves_at is None
    node.sleep(59.9)
    assert not node.evicts
    node.sleep(0.2)
    (evict,) = node.evicts.values()
    assert (evict.model, evict.reason, evict.to) == ("a", "idle", "cold")
    assert "no request for 60 s" in node.view("a").reason
    node.evicted()
    assert node.state("a") == "cold"
    node.sleep(10_000)
    assert node.state("b") == "ready", "without a keep_alive it stays"
    served(node)
    assert node.state("a") == "ready"


def test_every_request_starts_the_time_anew() -> None:
    node = node_with(60.0)
    served(node)
    node.sleep(50)
    long = node.arrive("a")
    assert node.view("a").leaves_at is None
    node.sleep(500)
    assert node.state("a") == "ready", "it is busy"
    node.cancel(long)
    node.sleep(59)
    assert node.state("a") == "ready", "a request whose client went away has ended now"
    node.sleep(2)
    assert node.evicts


def test_0_evicts_at_once_and_a_request_meanwhile_brings_it_back() -> None:
    node = node_with(0.0)
    first, second = node.arrive("a"), node.arrive("a")
    node.loaded()
    node.finish(first)
    assert not node.evicts
    node.finish(second)
    assert [evict.reason for evict in node.evicts.values()] == ["idle"]
    late = node.arrive("a")
    node.evicted()
    node.loaded()
    assert late in node.running


def test_the_host_tier_keeps_the_weights() -> None:
    node = node_with(5.0, host_tier_slots=100)
    served(node)
    node.note_kv("cpu:0", "a", 0, 4 * MIB)
    node.sleep(6)
    (evict,) = node.evicts.values()
    assert (evict.reason, evict.to) == ("idle", "warm")
    node.evicted()
    assert node.state("a") == "warm"


def test_a_pinned_model_stays_until_it_is_unpinned() -> None:
    node = node_with(10.0)
    served(node)
    node.command("pin", "a")
    node.sleep(1000)
    assert node.state("a") == "ready"
    assert node.view("a").leaves_at is None
    assert "keep_alive 10 s does not count while it is pinned" in node.scheduler.why("a")[-1]
    node.command("unpin", "a")
    assert node.evicts, "its last request is longer ago"


def test_an_operators_load_stays_until_it_was_requested() -> None:
    node = node_with(0.0)
    node.bring_up("a")
    node.sleep(1000)
    assert node.state("a") == "ready"
    assert "counts from its first request on" in node.scheduler.why("a")[-1]
    node.finish(node.arrive("a"))
    assert node.evicts
    node.evicted()
    node.register(facts("a", 20, keep_alive_s=10.0))
    served(node)
    node.sleep(9)
    node.command("load", "a")
    node.sleep(1000)
    assert node.state("a") == "ready", "loading what is there keeps it there"
    node.finish(node.arrive("a"))
    node.sleep(11)
    assert node.evicts


def test_a_requests_word_counts_until_the_next_or_until_the_model_has_left() -> None:
    node = node_with(60.0)
    request = node.arrive("a", keep_alive_s=5.0)
    node.loaded()
    node.finish(request)
    assert "keep_alive 5 s (set by a request)" in node.scheduler.why("a")[-1]
    node.finish(node.arrive("a"))
    assert node.view("a").keep_alive_s == 5, "a request without one changes nothing"
    node.finish(node.arrive("a", keep_alive_s=math.inf))
    node.sleep(500)
    assert node.state("a") == "ready"
    node.finish(node.arrive("a", keep_alive_s=3.0))
    node.sleep(4)
    node.evicted()
    assert node.state("a") == "cold"
    served(node)
    assert node.view("a").keep_alive_s == 60


def test_a_paused_models_word_still_counts_when_it_is_back() -> None:
    node = FakeNode({"cpu:0": 50}, tenure_s=0.0, tenure_reloads=0.0, preempt_after_s=0.0, overdue_after_s=1.0)
    node.register(facts("a", 30), facts("b", 30))
    request = node.arrive("a", keep_alive_s=5.0)
    node.loaded()
    node.arrive("b")
    node.sleep(20)
    node.evicted()
    node.loaded("b")
    assert node.state("a") == "paused"
    assert node.view("a").keep_alive_s == 5
    node.finish_all()
    assert node.ends[request] == "finished"


def test_the_word_of_a_request_that_never_ran_is_forgotten() -> None:
    node = node_with(60.0)
    node.cancel(node.arrive("a", keep_alive_s=0.0))
    node.finish_all()
    node.sleep(100)
    node.evicted()
    assert node.state("a") == "cold"
    assert node.view("a").keep_alive_s == 60


def test_the_word_for_a_model_that_pins_crowd_out_is_forgotten() -> None:
    node = FakeNode()
    node.register(facts("a", 60, keep_alive_s=60.0), facts("b", 60))
    node.engine_down("cpu:0")
    load = node.command("load", "a")
    node.command("pin", "b")
    node.post(events.KeepAliveSet, model="a", keep_alive_s=0.0)
    refusal = node.answers[load]
    assert refusal is not None
    assert refusal.code == "would_not_fit"
    assert node.view("a").keep_alive_s == 60


@pytest.mark.parametrize("busy", [False, True])
def test_a_client_sets_it_without_a_request(busy: bool) -> None:
    node = node_with(math.inf)
    node.post(events.KeepAliveSet, model="a", keep_alive_s=0.0)
    node.post(events.KeepAliveSet, model="nobody", keep_alive_s=0.0)
    assert node.view("a").keep_alive_s == math.inf, "it is not there"
    node.bring_up("a")
    request = node.arrive("a") if busy else 0
    node.post(events.KeepAliveSet, model="a", keep_alive_s=0.0)
    if busy:
        assert not node.evicts, "as soon as it is idle"
        node.finish(request)
    assert [evict.reason for evict in node.evicts.values()] == ["idle"]


def test_another_setting_applies_at_once() -> None:
    node = node_with(1000.0)
    served(node)
    node.sleep(50)
    old = facts("a", 20, keep_alive_s=1000.0)
    node.register(replace(old, keep_alive_s=60.0))
    assert node.view("a").leaves_at == pytest.approx(node.now + 10)
    assert "leaves in 10.0 s unless a request comes: keep_alive 60 s" in node.scheduler.why("a")[-1]
    node.register(replace(old, keep_alive_s=10.0))
    assert [action.reason for action in node.log if isinstance(action, actions.Evict)] == ["idle"]


def test_a_load_is_not_undone_when_its_request_is_long_gone() -> None:
    """The time counts from the end of the load at the earliest."""
    node = node_with(5.0)
    request = node.arrive("a")
    node.sleep(1)
    node.cancel(request)
    node.sleep(15)
    node.loaded()
    assert node.view("a").leaves_at == node.now + 5
