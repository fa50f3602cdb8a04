"""While its weights stream in, a model takes requests; should the load come to nothing, they wait as before."""

from __future__ import annotations

from tests.scheduler.node.fake_node import FakeNode, facts


def test_those_that_wait_and_those_that_come_are_submitted() -> None:
    node = FakeNode()
    node.register(facts("a"))
    first = node.arrive("a")
    assert not node.running
    node.streams("a")
    second = node.arrive("a")
    assert sorted(node.running) == [first, second]
    assert node.state("a") == "loading"
    node.loaded("a")
    assert node.state("a") == "ready"
    node.finish()
    assert node.ends == {first: "finished", second: "finished"}


def test_a_failed_load_leaves_them_as_it_would_have_found_them() -> None:
    node = FakeNode(max_wait_s=30.0, load_deadline_s=100.0)
    node.register(facts("a"))
    first = node.arrive("a")
    node.streams("a")
    node.load_fails("a bad sector")
    assert node.view("a").queued == 1
    assert not node.running
    node.sleep(29.0)
    assert first in node.open
    node.sleep(2.0)  # its time to wait counts from its arrival
    assert node.ends == {first: "wait_exceeded"}


def test_a_permanent_failure_refuses_them() -> None:
    node = FakeNode()
    node.register(facts("a"))
    first = node.arrive("a")
    node.streams("a")
    node.load_fails("a tensor is damaged", permanent=True)
    assert node.ends == {first: "model_failed"}


def test_a_load_that_misses_its_deadline_tells_them() -> None:
    node = FakeNode(load_deadline_s=5.0, max_wait_s=100.0)
    node.register(facts("a"))
    first = node.arrive("a")
    node.streams("a")
    node.sleep(6.0)
    assert node.ends == {first: "load_timeout"}
    node.evicted()


def test_who_goes_away_is_aborted() -> None:
    node = FakeNode()
    node.register(facts("a"))
    first = node.arrive("a")
    node.streams("a")
    node.cancel(first)
    node.loaded("a")
    assert node.state("a") == "ready"


def test_a_model_that_is_disabled_meanwhile() -> None:
    node = FakeNode()
    node.register(facts("a"))
    first = node.arrive("a")
    node.streams("a")
    node.command("disable", "a")
    node.evicted()
    assert node.ends == {first: "model_disabled"}
    assert node.state("a") == "disabled"
