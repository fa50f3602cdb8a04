"""Pinned models: loaded, kept, and together never more than there is."""

from __future__ import annotations

from tests.scheduler.node.fake_node import MIB, FakeNode, facts


def test_a_pin_loads_and_is_answered_when_ready() -> None:
    node = FakeNode()
    node.register(facts("a"))
    command = node.command("pin", "a")
    assert command in node.asked
    node.loaded("a")
    assert node.answers[command] is None
    assert node.view("a").pinned
    assert node.answers[node.command("pin", "a")] is None


def test_pinned_at_registration_loads_at_start() -> None:
    node = FakeNode(up=False)
    node.register(facts("a", pinned=True))
    assert not node.loads
    node.engine_up("cpu:0")
    assert [load.model for load in node.loads.values()] == ["a"]


def test_pins_beyond_memory_are_refused_with_the_arithmetic() -> None:
    node = FakeNode()
    node.register(facts("a", 60), facts("b", 60))
    node.command("pin", "a")
    refusal = node.answers[node.command("pin", "b")]
    assert refusal is not None
    assert refusal.code == "would_not_fit"
    for part in ("b needs", "68.0 MiB", "cpu:0 has 104857600", "pinned models (a)", "64.0 MiB"):
        assert part in refusal.message
    assert not node.view("b").pinned
    node.command("unpin", "a")
    command = node.command("pin", "b")
    node.loaded("a")
    node.evicted()
    node.loaded("b")
    assert node.answers[command] is None


def test_pins_count_before_they_are_loaded_and_the_work_space_too() -> None:
    node = FakeNode(up=False)
    node.register(facts("a", 40, work_space_bytes=20 * MIB), facts("b", 40), facts("c", 20))
    node.command("pin", "a")
    refusal = node.answers[node.command("pin", "b")]
    assert refusal is not None, "44 + 44 and the larger work space, 20, make 108"
    node.command("pin", "c")
    assert node.view("c").pinned


def test_pins_spread_over_devices() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:1": 100})
    node.register(facts("a", 60), facts("b", 60), facts("c", 60))
    node.command("pin", "a")
    node.command("pin", "b")
    assert {load.device for load in node.loads.values()} == {"cpu:0", "cpu:1"}
    refusal = node.answers[node.command("pin", "c")]
    assert refusal is not None
    assert "cpu:1 has" in refusal.message


def test_configured_pins_beyond_memory_say_so_and_serve_unpinned() -> None:
    node = FakeNode()
    node.register(facts("a", 60, pinned=True), facts("b", 60, pinned=True))
    assert not node.view("b").pinned
    assert "not pinned" in node.view("b").reason


def test_a_pinned_model_that_was_a_victim_stays() -> None:
    node = FakeNode()
    node.register(facts("a", 60), facts("b", 60))
    node.arrive("a")
    node.loaded("a")
    request = node.arrive("b")
    node.sleep(11)
    assert node.state("a") == "draining"
    assert node.answers[node.command("pin", "a")] is None
    assert node.state("a") == "ready"
    assert node.ends[request] == "would_not_fit"


def test_a_pinned_model_already_leaving_comes_back() -> None:
    node = FakeNode()
    node.register(facts("a", 60), facts("b", 60))
    node.bring_up("a")
    node.arrive("b")
    command = node.command("pin", "a")
    assert node.ends[1] == "would_not_fit"
    node.evicted()
    node.loaded("a")
    assert node.answers[command] is None


def test_unload_of_a_pinned_model_is_refused() -> None:
    node = FakeNode()
    node.register(facts("a"))
    node.command("pin", "a")
    node.loaded("a")
    refusal = node.answers[node.command("unload", "a")]
    assert refusal is not None
    assert refusal.code == "busy"
    assert "unpin" in refusal.message
    node.command("unpin", "a")
    command = node.command("unload", "a")
    node.evicted()
    assert node.answers[command] is None


def test_a_pinned_model_whose_home_is_dead_moves() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:1": 100})
    node.register(facts("a", 60))
    node.command("pin", "a")
    node.loaded("a")
    home = node.view("a").device
    node.engine_down(home)
    node.loaded("a")
    assert node.view("a").device not in ("", home)
    node.engine_up(home)
    assert not node.loads


def test_a_pin_can_be_taken_back_while_it_loads() -> None:
    node = FakeNode()
    node.register(facts("a", 60), facts("b", 60))
    node.command("pin", "a")
    node.command("unpin", "a")
    node.loaded("a")
    request = node.arrive("b")
    node.evicted()
    node.loaded("b")
    assert request in node.running


def test_the_operators_pin_outlives_a_change_of_files() -> None:
    node = FakeNode()
    node.register(facts("a"))
    node.command("pin", "a")
    node.loaded("a")
    node.register(facts("a", fingerprint="2"))
    assert node.view("a").pinned
    node.register(facts("a", fingerprint="2", pinned=True))
    node.register(facts("a", fingerprint="2", pinned=False))
    assert not node.view("a").pinned, "the configuration was changed"
