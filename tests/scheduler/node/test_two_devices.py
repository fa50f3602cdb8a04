"""Placement over two devices, and one's troubles leaving the other alone."""

from __future__ import annotations

from tests.scheduler.node.fake_node import FakeNode, facts


def two(**settings: float) -> FakeNode:
    return FakeNode({"cpu:0": 100, "cpu:1": 80}, **settings)


def test_models_spread_and_load_in_parallel() -> None:
    node = two()
    node.register(facts("a"), facts("b"))
    node.arrive("a")
    node.arrive("b")
    assert {load.device for load in node.loads.values()} == {"cpu:0", "cpu:1"}


def test_an_allowed_device_is_kept_to() -> None:
    node = two()
    node.register(facts("a", 20, devices=("cpu:1",)), facts("b", 20, devices=("cpu:1",)), facts("typo", 20, devices=("cpu:7",)))
    for name in "ab":
        node.arrive(name)
        node.loaded(name)
        assert node.view(name).device == "cpu:1"
    assert node.state("typo") == "refused"
    assert "cpu:7" in node.view("typo").reason


def test_only_the_device_it_fits() -> None:
    node = two()
    node.register(facts("large", 86))
    node.arrive("large")
    assert node.loads[1].device == "cpu:0"


def test_free_room_elsewhere_spares_an_idle_model() -> None:
    node = two()
    node.register(facts("a", 60, devices=("cpu:0",)), facts("b", 60))
    node.bring_up("a")
    node.arrive("b")
    assert not node.evicts
    assert node.loads[2].device == "cpu:1"


def test_an_idle_victim_elsewhere_spares_a_busy_model() -> None:
    node = two()
    node.register(facts("a", 60, devices=("cpu:0",)), facts("b", 60, devices=("cpu:1",)), facts("c", 60))
    node.bring_up("b")
    node.arrive("a")
    node.loaded("a")
    node.arrive("c")
    assert [evict.model for evict in node.evicts.values()] == ["b"]


def test_a_death_leaves_the_other_device_alone() -> None:
    node = two()
    node.register(facts("a", 60, devices=("cpu:0",)), facts("b", 60, devices=("cpu:1",)))
    first, second = node.arrive("a"), node.arrive("b")
    node.loaded("a")
    node.loaded("b")
    done = node.engine_down("cpu:0", running=(first,))
    assert {getattr(action, "model", "a") for action in done} == {"a"}
    assert set(node.running) == {second}
    assert node.arrive("b") in node.running


def test_a_dead_devices_requests_go_on_elsewhere() -> None:
    node = two()
    node.register(facts("a", 60))
    first = node.arrive("a")
    node.loaded("a")
    node.engine_down(node.view("a").device)
    assert [load.device for load in node.loads.values()] == ["cpu:1"]
    node.loaded("a")
    assert first in node.running


def test_a_device_waiting_for_a_busy_victim_goes_on_loading_what_fits() -> None:
    node = FakeNode({"cpu:0": 100})
    node.register(facts("a", 60), facts("b", 60), facts("small", 20))
    node.arrive("a")
    node.loaded("a")
    node.arrive("b")
    node.sleep(11)
    assert node.state("a") == "draining"
    request = node.arrive("small")
    node.loaded("small")
    assert request in node.running
    node.finish(1)
    node.evicted("a")
    node.loaded("b")
    assert 2 in node.running


def test_what_is_promised_is_not_given_to_others() -> None:
    node = FakeNode({"cpu:0": 100})
    node.register(facts("a", 60), facts("b", 80), facts("greedy", 26))
    node.arrive("a")
    node.loaded("a")
    node.arrive("b")
    node.sleep(11)
    node.arrive("greedy")
    assert not node.loads, "28 MiB are free, but b needs 20 of them besides a's"
    node.finish(1)
    node.evicted("a")
    assert [load.model for load in node.loads.values()] == ["b"]


def test_a_device_that_nobody_declared_is_taken_in() -> None:
    node = FakeNode({"cpu:0": 50})
    node.register(facts("a", 60))
    assert node.state("a") == "refused"
    node.budgets["cpu:1"] = 100 * 2**20
    node.engine_up("cpu:1")
    assert node.state("a") == "cold"
    node.arrive("a")
    assert node.loads[1].device == "cpu:1"


def test_an_engine_with_another_budget_is_judged_anew() -> None:
    node = FakeNode({"cpu:0": 100})
    node.register(facts("a", 60))
    node.arrive("a")
    node.engine_down("cpu:0")
    node.budgets["cpu:0"] = 50 * 2**20
    node.engine_up("cpu:0")
    assert node.state("a") == "refused"
    assert node.ends[1] == "model_too_large"


def test_requests_wait_for_a_node_without_devices() -> None:
    node = FakeNode({"cpu:0": 100}, up=False)
    node.register(facts("a"))
    request = node.arrive("a")
    assert any("no engine is up" in line for line in node.scheduler.why(f"req-{request}"))
    node.engine_up("cpu:0")
    node.loaded()
    assert request in node.running
