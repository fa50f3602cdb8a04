"""Further replicas of a model (rule 13): when they come, which requests they get, and how they make room."""

from __future__ import annotations

from scheduler.node import actions, events
from tests.scheduler.node.fake_node import MIB, FakeNode, facts, replicas_of

TWO = {"cpu:0": 100, "cpu:1": 100}


def node_of_two(at: int = 0, **others: object) -> FakeNode:
    """Two devices, and a model with a replica on each while it has requests."""
    node = FakeNode(TWO)
    node.register(*replicas_of(facts("a", **others), 2, at))
    return node


def test_a_further_replica_comes_with_the_first_request_and_takes_its_share() -> None:
    node = node_of_two()
    first = node.arrive("a")
    node.loaded("a")
    assert [load.model for load in node.loads.values()] == ["a#2"]
    assert node.log[-1].reason == "replica"  # type: ignore[attr-defined]
    node.loaded("a#2")
    assert {node.view("a").device, node.view("a#2").device} == {"cpu:0", "cpu:1"}
    more = [node.arrive("a") for _ in range(5)]
    devices = [node.running[request].device for request in [first, *more]]
    assert devices.count("cpu:0") == devices.count("cpu:1") == 3


def test_a_model_that_nobody_requests_has_no_further_replica() -> None:
    node = node_of_two()
    node.command("load", "a")
    node.loaded("a")
    assert not node.loads


def test_by_load_a_further_replica_comes_when_enough_requests_run() -> None:
    node = node_of_two(at=3)
    node.arrive("a")
    node.loaded("a")
    node.arrive("a")
    assert not node.loads
    node.arrive("a")
    assert [load.model for load in node.loads.values()] == ["a#2"]


def test_a_further_replica_makes_nobody_leave_and_comes_when_there_is_room() -> None:
    node = FakeNode(TWO)
    node.register(facts("b", 70, devices=("cpu:1",)), *replicas_of(facts("a"), 2))
    node.command("load", "b")
    node.loaded("b")
    node.arrive("a")
    node.loaded("a")
    assert not node.loads
    assert "b" in {view.name for view in node.scheduler.snapshot() if view.device}
    node.command("unload", "b")
    node.evicted("b")
    assert [load.model for load in node.loads.values()] == ["a#2"]


def test_nothing_is_waited_for_when_the_engine_of_one_replica_dies() -> None:
    node = node_of_two(max_sequences=8)
    node.arrive("a")
    node.loaded("a")
    node.loaded("a#2")
    requests = [1, *(node.arrive("a") for _ in range(5))]
    node.engine_down(node.view("a").device)
    assert {node.running[request].model for request in requests} == {"a#2"}
    assert not node.scheduler.queue()


def test_a_busy_replica_leaves_for_another_model_at_once() -> None:
    """It drains without the other being overdue, and its requests go on at the other replica if they take too long."""
    node = node_of_two(max_sequences=8)
    node.register(facts("b", 70, devices=("cpu:1",)))
    node.arrive("a")
    node.loaded("a")
    node.loaded("a#2")
    requests = [1, *(node.arrive("a") for _ in range(3))]
    assert node.view("a#2").device == "cpu:1"
    other = node.arrive("b")
    assert node.scheduler.state("a#2") == "draining"
    later = node.arrive("a")
    assert node.running[later].model == "a"
    node.sleep(0.9)
    assert "a#2" in {node.running[request].model for request in requests}
    node.sleep(0.2)  # preempt_after_s is over
    assert {node.running[request].model for request in [*requests, later]} == {"a"}
    node.evicted("a#2")
    node.loaded("b")
    assert node.running[other].device == "cpu:1"
    assert node.scheduler.state("a") == "ready"


def test_the_first_replica_stays_while_the_other_leaves() -> None:
    """Checks that only one of two replicas is spare: the last one leaves for overdue work alone, as any busy model does."""
    node = node_of_two()
    node.register(facts("b", 70, devices=("cpu:0",)))
    node.arrive("a")
    node.loaded("a")
    node.loaded("a#2")
    assert node.view("a").device == "cpu:0"
    node.arrive("a")
    node.arrive("b")
    assert node.scheduler.state("a") == "ready"


def test_an_idle_replica_leaves_before_an_idle_model() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:1": 120})
    node.register(facts("b", 40, devices=("cpu:1",)), facts("c", 60, devices=("cpu:1",)), *replicas_of(facts("a"), 2))
    node.command("load", "b")
    node.loaded("b")
    node.arrive("a")
    node.loaded("a")
    node.loaded("a#2")
    node.finish()
    for _ in range(3):
        node.arrive("b")
        node.finish()
    first_on = node.view("a").device
    node.arrive("c")
    leaving = next(action for action in reversed(node.log) if isinstance(action, actions.Evict))
    assert (leaving.model, first_on) == ("a#2", "cpu:0")


def test_a_request_goes_to_the_replica_that_has_its_prefix_unless_that_is_much_busier() -> None:
    node = node_of_two(max_sequences=32)
    node.arrive("a")
    node.loaded("a")
    node.loaded("a#2")
    node.finish()
    cached = (("a#2", 8),)  # of 10
    followed = [node.running[node.arrive("a", cached=cached)].model for _ in range(9)]
    assert followed[:5] == ["a#2"] * 5
    assert "a" in followed
    node.finish()
    node.arrive("a")
    little = node.arrive("a", cached=(("a", 4),))
    assert node.running[little].model == "a#2"
    node.arrive("a")
    both = node.arrive("a", cached=(("a", 8), ("a#2", 8)))
    assert node.running[both].model == "a#2"


def test_requests_wait_in_one_queue_for_whichever_replica_is_free_first() -> None:
    node = node_of_two(max_sequences=1)
    node.arrive("a")
    node.loaded("a")
    node.loaded("a#2")
    requests = [1, *(node.arrive("a") for _ in range(6))]
    assert len(node.running) == 2, "none waits in an engine"
    assert len(node.scheduler.queue()) == 5
    at_second = next(request for request in requests if request in node.running and node.running[request].model == "a#2")
    node.finish(at_second)
    assert node.running[requests[2]].model == "a#2"


def test_commands_are_for_all_replicas() -> None:
    node = node_of_two()
    node.arrive("a")
    node.loaded("a")
    node.loaded("a#2")
    node.arrive("a")
    node.command("disable", "a")
    assert {node.scheduler.state("a"), node.scheduler.state("a#2")} == {"draining"}
    node.finish()
    node.evicted()
    node.command("enable", "a")
    node.arrive("a")
    node.loaded("a")
    node.loaded("a#2")
    unload = node.command("unload", "a")
    node.evicted("a")
    assert unload not in node.answers
    node.evicted("a#2")
    assert node.answers[unload] is None
    refused = node.command("load", "a#2")
    assert "a#2 is a replica of a" in node.answers[refused].message  # type: ignore[union-attr]


def test_replicas_that_the_settings_take_away_drain_and_are_forgotten() -> None:
    node = node_of_two()
    node.arrive("a")
    node.loaded("a")
    node.loaded("a#2")
    second = node.arrive("a")
    node.remove("a#2")
    assert node.scheduler.state("a#2") == "draining"
    node.finish(second)
    node.evicted("a#2")
    assert node.scheduler.model("a#2") is None
    assert not node.loads


def test_a_model_whose_first_replica_fails_is_served_by_the_other() -> None:
    node = node_of_two()
    node.arrive("a")
    node.loaded("a")
    node.loaded("a#2")
    node.finish()
    node.engine_down("cpu:0")
    node.engine_up("cpu:0")
    node.arrive("a")
    assert [load.model for load in node.loads.values()] == ["a"]
    node.load_fails(permanent=True)
    assert node.scheduler.state("a") == "failed"
    assert node.running[node.arrive("a")].model == "a#2"
    node.engine_down("cpu:1")
    assert node.ends[3] == "model_failed"


def test_no_replica_leaves_by_keep_alive_while_another_is_used() -> None:
    node = node_of_two(keep_alive_s=10.0)
    node.arrive("a")
    node.loaded("a")
    node.loaded("a#2")
    for _ in range(4):
        node.finish()
        node.sleep(6.0)
        node.arrive("a")
    assert {node.view("a").state, node.view("a#2").state} == {"ready"}
    node.finish()
    node.sleep(11.0)
    node.evicted()
    assert {node.view("a").state, node.view("a#2").state} == {"cold"}
    assert sum(isinstance(action, actions.Load) for action in node.log) == 2


def test_a_device_whose_requests_wait_for_kv_gets_no_further_replica() -> None:
    node = FakeNode(TWO)
    node.register(facts("b", 40, devices=("cpu:1",)), *replicas_of(facts("a", 40), 2))
    node.arrive("b")
    node.loaded("b")
    node.note_kv("cpu:1", "b", 60 * MIB)
    node.post(events.KVNoted, device="cpu:1", kv_bytes={"b": (60 * MIB, 0)}, waiting={"b": 1})
    node.arrive("a")
    node.loaded("a")
    assert not node.loads
    node.sleep(31.0)
    node.arrive("a")
    assert [load.model for load in node.loads.values()] == ["a#2"]


def test_a_model_goes_back_to_where_its_weights_were_left() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:1": 200}, up=False)
    node.register(*replicas_of(facts("a"), 2))
    node.engine_up("cpu:1", left=("a#2",))
    node.engine_up("cpu:0", left=("a",))
    node.arrive("a")
    assert node.loaded("a", adopted=True)
    node.loaded("a#2", adopted=True)
    assert (node.view("a").device, node.view("a#2").device) == ("cpu:0", "cpu:1")
