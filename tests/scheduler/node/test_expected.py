"""The load of a model begins while its request is being read, where nobody has to wait for it; it then counts as the request's."""

from __future__ import annotations

import pytest

from tests.scheduler.node.fake_node import FakeNode, facts


def node_with(**others: object) -> FakeNode:
    """Two models of 40 MiB fit, three do not."""
    node = FakeNode()
    node.register(*(facts(name, **others) for name in ("a", "b", "c")))
    return node


def loading(node: FakeNode) -> list[str]:
    return [load.model for load in node.loads.values()]


def used(node: FakeNode, *names: str) -> None:
    for name in names:
        request = node.arrive(name)
        node.loaded(name)
        node.finish(request)


def test_the_load_begins_and_the_request_finds_it() -> None:
    node = node_with()
    expectation = node.expect("a")
    (load,) = node.loads.values()
    assert (load.model, load.reason) == ("a", "request")
    node.sleep(0.5)
    request = node.arrive("a")
    assert not node.over("a", expectation)
    node.loaded("a")
    assert request in node.running
    assert any("a request for it is being read" in line for line in node.scheduler.why("a"))


def test_idle_models_leave_for_it_at_once() -> None:
    node = node_with()
    used(node, "a", "b")
    expectation = node.expect("c")
    assert len(node.evicts) == 1
    node.evicted()
    assert loading(node) == ["c"], "it is wanted until the request is there"
    node.arrive("c")
    node.over("c", expectation)
    node.loaded("c")


def test_a_request_that_does_not_come_leaves_a_load_and_drops_a_placement() -> None:
    """What has been told to leave leaves, as for a request that is cancelled, and nothing takes its place."""
    node = node_with()
    node.over("a", node.expect("a"))
    assert loading(node) == ["a"]
    node.loaded("a")
    used(node, "b")
    node.over("c", node.expect("c"))
    node.evicted()
    assert not node.loads
    assert node.state("c") == "cold"
    node.sleep(1000)
    assert not node.loads


def test_what_was_loaded_for_it_leaves_by_its_keep_alive() -> None:
    """Otherwise than after `hearth load`: a request that is refused later must not leave a model there for ever."""
    node = node_with(keep_alive_s=5.0)
    node.over("a", node.expect("a"))
    node.loaded("a")
    node.sleep(4.9)
    assert node.state("a") == "ready"
    node.sleep(0.2)
    node.evicted()
    assert node.state("a") == "cold"


def test_nobody_in_use_leaves_for_it_and_it_does_not_wait_in_line() -> None:
    node = node_with()
    running = [node.arrive("a"), node.arrive("b")]
    node.loaded("a")
    node.loaded("b")
    node.expect("c")
    node.sleep(10_000)
    node.finish(*running)
    assert not node.evicts
    assert node.state("c") == "cold"


def test_it_passes_nobody_who_waits() -> None:
    """b waits for room beside a busy model; what is free goes to it, not to a smaller model that is expected."""
    node = FakeNode()
    node.register(facts("a", 40), facts("b", 70), facts("c", 20))
    node.arrive("a")
    node.loaded("a")
    node.arrive("b")
    node.expect("c")
    assert not node.loads
    node.arrive("c")
    assert loading(node) == ["c"], "a request may"


@pytest.mark.parametrize("refused", ["drained", "disabled", "full", "unknown", "huge"])
def test_a_request_that_would_be_refused_loads_nothing(refused: str) -> None:
    node = FakeNode()
    node.register(facts("a", 40, max_queued=1), facts("huge", 400), facts("busy", 60))
    name = {"unknown": "x", "huge": "huge"}.get(refused, "a")
    if refused == "drained":
        node.command("drain", "")
    elif refused == "disabled":
        node.command("disable", "a")
    elif refused == "full":
        node.arrive("busy")
        node.loaded("busy")
        node.arrive("a")
    node.over(name, node.expect(name))
    assert not node.loads
    assert not node.evicts


def test_several_requests_for_one_model() -> None:
    node = node_with()
    used(node, "a", "b")
    first, second = node.expect("c"), node.expect("c")
    node.over("c", first)
    node.evicted()
    assert loading(node) == ["c"], "the second wants it still"
    node.over("c", second)


def test_a_load_that_fails_is_no_endless_one() -> None:
    """While the request is being read the load is tried again as for a request; afterwards it is not."""
    node = node_with()
    expectation = node.expect("a")
    node.load_fails()
    node.over("a", expectation)
    node.sleep(1000)
    assert not node.loads


def test_an_expectation_ends_with_the_load() -> None:
    """A model that was ready and had to leave again is not brought back for a request that is still being read."""
    node = node_with()
    expectation = node.expect("a")
    node.loaded("a")
    node.command("unload", "a")
    node.evicted()
    assert node.state("a") == "cold"
    assert not node.loads
    node.over("a", expectation)
