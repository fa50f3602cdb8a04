"""Loads of split mixtures take copies of experts where memory is free for them on all their devices, and only there."""

from __future__ import annotations

from typing import Any

from scheduler.node import events
from scheduler.node.events import ExpertCopies
from tests.scheduler.node.fake_node import MIB, FakeNode, facts

TABLE = (((2,), (0,)),)
COPIES = ExpertCopies(1, 30 * MIB, TABLE)  # 10 MiB more than the share of 20 MiB


def node_of(first: int = 100, second: int = 100, **settings: Any) -> FakeNode:
    node = FakeNode({"cpu:0": first, "cpu:1": second}, **settings)
    node.register(facts("mix", 20, num_ranks=2, expert_copies=2))
    return node


def choose(node: FakeNode, copies: ExpertCopies | None = COPIES) -> None:
    node.post(events.CopiesChosen, model="mix", copies=copies)


def held(node: FakeNode, device: str, model: str = "mix") -> int:
    return next(one.held[model] for one in node.scheduler.devices() if one.name == device)


def told(node: FakeNode) -> str:
    return " ".join(node.scheduler.why("mix"))


def test_a_load_takes_copies_into_free_memory() -> None:
    node = node_of()
    choose(node)
    assert "with up to 1 further expert in each layer on each device" in plan(node)
    node.arrive("mix")
    (load,) = node.loads.values()
    assert (load.expert_copies, load.weights_chunks) == (TABLE, 15)  # chunks of 2 MiB
    node.loaded("mix")
    assert (node.view("mix").expert_copies, node.view("mix").weights_bytes) == (1, 30 * MIB)
    assert held(node, "cpu:0") == held(node, "cpu:1") == 15 + load.kv_reserved_chunks
    assert "loads with up to 1 further expert in each layer on each device" in told(node)


def plan(node: FakeNode) -> str:
    found = node.scheduler.plan_load("mix", node.now)
    assert found is not None
    return found.reason


def test_without_a_choice_nothing_changes() -> None:
    node = node_of()
    assert "experts" not in plan(node)
    node.arrive("mix")
    (load,) = node.loads.values()
    assert (load.expert_copies, load.weights_chunks) == ((), 10)
    choose(node)
    node.loaded("mix")
    assert node.view("mix").expert_copies == 0, "what is loaded stays as it is"


def test_one_device_without_room_is_enough_to_do_without() -> None:
    node = node_of(100, 34)  # 20 + 4 for KV + 4 of work space: 6 are free
    choose(node)
    assert "without copies of experts: cpu:1 has 2 chunks too few free" in plan(node)
    node.arrive("mix")
    (load,) = node.loads.values()
    assert (load.expert_copies, load.weights_chunks) == ((), 10)
    node.loaded("mix")
    assert node.view("mix").expert_copies == 0
    assert "loads without copies of experts: cpu:1 has 2 chunks too few free" in told(node)


def test_no_model_leaves_for_copies() -> None:
    """With it there is room for the share, but not for copies."""
    node = node_of(100, 70)
    node.register(facts("other", 30, devices=("cpu:1",)))
    node.bring_up("other")
    choose(node)
    node.arrive("mix")
    assert not node.evicts
    (load,) = node.loads.values()
    assert load.expert_copies == ()
    node.loaded("mix")
    assert node.state("other") == "ready"


def test_a_model_that_left_for_the_share_leaves_room_for_copies() -> None:
    node = node_of(100, 60)
    node.register(facts("other", 40, devices=("cpu:1",)))
    node.bring_up("other")
    choose(node)
    assert "other would leave; with up to 1 further expert" in plan(node)
    node.arrive("mix")
    node.evicted("other")
    (load,) = node.loads.values()
    assert load.expert_copies == TABLE


def test_kv_in_use_is_not_free() -> None:
    node = node_of(100, 76)
    node.register(facts("other", 20, devices=("cpu:1",)))
    node.bring_up("other")
    choose(node)
    assert "with up to 1 further" in plan(node)
    node.note_kv("cpu:1", "other", 20 * MIB)  # 4 MiB of it are its reserve
    assert "without copies of experts: cpu:1" in plan(node)
    node.arrive("mix")
    assert next(iter(node.loads.values())).expert_copies == ()


def test_room_of_pinned_models_is_not_free() -> None:
    node = node_of(100, 70)
    node.register(facts("pinned", 30, devices=("cpu:1",)))
    node.command("pin", "pinned")
    node.loaded("pinned")
    node.engine_down("cpu:1")
    node.engine_up("cpu:1")
    node.load_fails()  # it is not there, but its room is kept
    choose(node)
    assert "without copies of experts: cpu:1" in plan(node)


def test_none_where_another_model_is_in_line() -> None:
    node = node_of(100, 100)
    node.register(facts("slow", 10, devices=("cpu:1",)), facts("large", 60, devices=("cpu:1",)))
    node.arrive("slow")  # occupies the loader
    choose(node)
    node.arrive("mix")
    node.arrive("large")
    node.loaded("slow")
    mine = next(load for load in node.loads.values() if load.model == "mix")
    assert mine.expert_copies == ()
    assert "another model is in line for cpu:1" in told(node)


def test_copies_are_chosen_anew_for_the_next_load() -> None:
    node = node_of()
    choose(node)
    node.bring_up("mix")
    assert node.view("mix").expert_copies == 1
    choose(node, None)
    node.command("unload", "mix")
    node.evicted("mix")
    node.bring_up("mix")
    assert node.view("mix").expert_copies == 0


def test_new_files_or_settings_forget_the_choice() -> None:
    node = node_of()
    choose(node)
    node.register(facts("mix", 20, num_ranks=2, expert_copies=2, fingerprint="2"))
    node.arrive("mix")
    assert next(iter(node.loads.values())).expert_copies == ()


def test_a_pinned_model_may_have_copies_too() -> None:
    node = node_of()
    choose(node)
    node.command("pin", "mix")
    node.loaded("mix")
    assert node.view("mix").expert_copies == 1
    node.command("unpin", "mix")


def test_shares_with_copies_are_not_loaded_from_host_memory() -> None:
    """What host memory has are shares without copies."""
    node = node_of(host_tier_slots=100)
    node.arrive("mix")
    node.loaded("mix")
    node.finish()
    choose(node)
    node.command("unload", "mix", to="warm")
    node.evicted("mix")
    assert node.state("mix") == "warm"
    node.arrive("mix")
    (load,) = node.loads.values()
    assert (load.expert_copies, load.source_slots, load.keep_slots) == (TABLE, (), ())
    node.loaded("mix")


def test_an_unknown_model_is_ignored() -> None:
    node = node_of()
    node.post(events.CopiesChosen, model="gone", copies=COPIES)
