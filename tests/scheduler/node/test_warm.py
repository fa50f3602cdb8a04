"""A load ahead of requests begins at once or not at all, and takes nothing from anybody."""

from __future__ import annotations

from tests.scheduler.node.fake_node import FakeNode, facts


def node_with(**others: object) -> FakeNode:
    """Two models of 40 MiB fit, three do not."""
    node = FakeNode()
    node.register(*(facts(name, **others) for name in ("a", "b", "c")))
    return node


def refusal(node: FakeNode, name: str) -> str:
    """The message with which a load ahead is refused."""
    answer = node.answers[node.command("warm", name)]
    assert answer is not None
    assert answer.code in ("would_not_fit", "busy")
    return answer.message


def used(node: FakeNode, name: str) -> None:
    request = node.arrive(name)
    node.loaded(name)
    node.finish(request)


def test_it_is_loaded_where_there_is_room_and_stays_until_it_was_requested() -> None:
    node = node_with(keep_alive_s=5.0)
    command = node.command("warm", "a")
    assert command in node.asked
    node.loaded("a")
    assert node.answers[command] is None
    node.sleep(1000)
    assert node.state("a") == "ready", "keep_alive counts from the first request on"
    assert node.answers[node.command("warm", "a")] is None, "it is there already"


def test_idle_models_leave_for_it_that_have_been_used() -> None:
    node = node_with()
    used(node, "a")
    used(node, "b")
    command = node.command("warm", "c")
    node.evicted()
    node.loaded("c")
    assert node.answers[command] is None


def test_nobody_in_use_leaves_for_it() -> None:
    node = node_with()
    running = [node.arrive("a"), node.arrive("b")]
    node.loaded("a")
    node.loaded("b")
    assert "no room beside a (ready, 1 running, 0 queued), b (ready, 1 running" in refusal(node, "c")
    node.sleep(10_000)
    assert node.state("c") == "cold", "it does not wait in line, where it would become overdue"
    assert not node.evicts
    node.finish(*running)
    command = node.command("warm", "c")
    node.evicted()
    node.loaded("c")
    assert node.answers[command] is None


def test_models_loaded_ahead_do_not_chase_each_other() -> None:
    node = node_with()
    for name in ("a", "b"):
        node.command("warm", name)
        node.loaded(name)
    assert "it would take the place of a, loaded ahead as well" in refusal(node, "c")
    node.arrive("c")
    node.evicted()
    assert "c" in [load.model for load in node.loads.values()], "requests may"


def test_pins_keep_their_room() -> None:
    node = node_with()
    for name in ("a", "b"):
        node.command("pin", name)
    assert "pinned models (a, b) take" in refusal(node, "c")


def test_a_load_under_way_goes_first() -> None:
    node = node_with()
    node.arrive("a")
    assert refusal(node, "b") == "cpu:0: the placement of a goes first"
    node.loaded("a")
    node.command("warm", "b")
    node.loaded("b")


def test_work_that_waits_goes_first() -> None:
    node = FakeNode()
    node.register(facts("a", 60), facts("b", 60), facts("small", 5))
    node.arrive("a")
    node.loaded("a")
    node.arrive("b")
    assert refusal(node, "small") == "cpu:0: b waits for room there"


def test_without_an_engine_it_is_to_be_asked_again() -> None:
    node = FakeNode(up=False)
    node.register(facts("a"))
    assert "no engine is up" in refusal(node, "a")


def test_what_cannot_be_loaded_is_refused_as_a_load_is() -> None:
    node = node_with()
    node.command("disable", "a")
    for name, code in (("a", "model_disabled"), ("nobody", "model_not_found")):
        answer = node.answers[node.command("warm", name)]
        assert answer is not None
        assert answer.code == code
