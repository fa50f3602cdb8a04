"""A busy model that has to make room drains, and is paused when that takes too long; what it ran goes on later."""

from __future__ import annotations

import pytest

from scheduler.node import actions, events, preemption
from tests.scheduler.node.fake_node import MIB, FakeNode, facts


def until_overdue(node: FakeNode) -> None:
    """overdue_after_s, and the seconds it takes to load the model."""
    deadline = node.scheduler.next_deadline()
    assert deadline is not None
    assert 10 < deadline - node.now < 11
    node.sleep(deadline - node.now)


def contended(**settings: float) -> FakeNode:
    """`a` runs requests 1 and 2; request 3 for `b`, for which there is no room beside it, is overdue: `a` drains since then."""
    node = FakeNode(**settings)
    node.register(facts("a", 60), facts("b", 60))
    node.arrive("a")
    node.arrive("a")
    node.loaded("a")
    node.arrive("b")
    until_overdue(node)
    assert node.state("a") == "draining"
    return node


def test_what_ends_soon_is_left_to_end() -> None:
    node = contended()
    node.sleep(0.9)  # preempt_after_s
    assert set(node.running) == {1, 2}
    assert not node.evicts
    node.finish()
    assert [evict.reason for evict in node.evicts.values()] == ["room"]
    assert node.paused == ()


def test_what_drains_too_long_is_paused_and_goes_on_later() -> None:
    node = contended()
    node.sleep(1.1)
    assert node.paused == (1, 2)
    (evict,) = node.evicts.values()
    assert (evict.model, evict.reason, evict.age_s) == ("a", "preempted", pytest.approx(11.3, abs=0.1))
    node.evicted()
    assert node.state("a") == "paused"
    assert [(entry.request_id, entry.resubmission) for entry in node.scheduler.queue() if entry.model == "a"] == [
        (1, True),
        (2, True),
    ]
    node.loaded("b")
    assert set(node.running) == {3}
    node.sleep(1)
    assert node.state("b") == "ready"
    node.finish(3)
    node.evicted()
    assert node.state("a") == "loading"
    node.loaded("a")
    assert set(node.running) == {1, 2}
    node.finish()
    assert node.ends == {1: "finished", 2: "finished", 3: "finished"}


def test_the_patience_follows_what_a_pause_costs() -> None:
    node = FakeNode()
    node.register(facts("a", 60), facts("b", 60))
    node.arrive("a")
    node.loaded("a", seconds=6.0)
    node.arrive("b")
    node.sleep(12 + 2.8)  # b is thought to take long, too: 2 s
    assert node.state("a") == "draining"
    assert set(node.running) == {1}
    node.sleep(0.3)
    assert node.paused == (1,)
    slow = contended(preempt_after_s=5.0)
    slow.sleep(4.9)
    assert not slow.paused
    slow.sleep(0.2)
    assert slow.paused


def test_idle_victims_do_not_prolong_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """b takes the place of a, which is busy, and of i, which is idle, and costs nothing to pause."""
    monkeypatch.setattr(preemption, "pause_cost_s", lambda node, model: {"a": 0.1, "i": 100.0}[model.name])
    node = FakeNode()
    node.register(facts("a", 40), facts("i", 40), facts("b", 90))
    node.arrive("i")
    node.loaded("i")
    node.finish()
    node.arrive("a")
    node.loaded("a")
    node.arrive("b")
    node.sleep(11.5)
    assert node.state("a") == "draining"
    assert not node.paused
    node.sleep(1.1)  # preempt_after_s
    assert node.paused == (2,)


def test_what_must_be_computed_again_prolongs_the_patience_and_kept_prefixes_do_not() -> None:
    for running_tokens, cached_tokens, patience_s in ((4000, 0, (0.5 + 8.0) / 2), (0, 100_000, 1.0)):
        node = FakeNode()
        node.register(facts("a", 60), facts("b", 60))
        node.arrive("a")
        node.loaded("a")
        node.post(events.PrefillMeasured, model="a", device="cpu:0", num_tokens=500, seconds=1.0)
        node.note_kv("cpu:0", "a", 1024 * running_tokens, 1024 * cached_tokens)
        node.arrive("b")
        until_overdue(node)
        node.sleep(patience_s - 0.1)
        assert not node.paused
        node.sleep(0.2)
        assert node.paused == (1,)


def test_work_that_has_been_overdue_for_long_waits_no_more_than_it_must() -> None:
    """b could force nobody while a was new: by then it is overdue by more than a's pause costs."""
    node = FakeNode(tenure_s=30.0)
    node.register(facts("a", 60), facts("b", 60))
    node.arrive("a")
    node.loaded("a", seconds=6.0)
    node.arrive("b")
    node.sleep(29.9)
    assert node.state("a") == "ready"
    node.sleep(0.2)
    assert node.state("a") == "draining"
    node.sleep(1.0)
    assert node.paused == (1,), "preempt_after_s, not half of 6 s"


def test_a_paused_request_queues_anew_and_waits_without_limit() -> None:
    """Both models have work for ever: each has its turn."""
    node = contended()
    node.sleep(1.1)
    node.evicted()
    node.loaded("b")
    node.sleep(10.2)
    assert node.state("b") == "ready", "the paused ones are overdue only after their own 10 s, and half a second for loading a"
    node.sleep(0.4)
    assert node.state("b") == "draining"
    node.sleep(1.1)
    node.evicted()
    node.loaded("a")
    assert set(node.running) == {1, 2}
    assert set(node.open) == {1, 2, 3}, "nobody was turned away"


def test_nobody_is_paused_for_one_who_gives_up() -> None:
    node = contended()
    node.cancel(3)
    assert node.state("a") == "ready"
    node.sleep(30)
    assert not node.paused


def test_a_paused_model_nobody_waits_for_is_at_rest() -> None:
    node = contended()
    node.sleep(1.1)
    node.evicted()
    node.loaded("b")
    assert node.state("a") == "paused"
    node.cancel(1)
    assert node.state("a") == "paused"
    node.cancel(2)
    assert node.state("a") == "cold"


def test_cancelled_while_its_model_is_being_paused() -> None:
    node = contended()
    node.sleep(1.1)
    node.cancel(1)
    node.cancel(2)
    node.evicted()
    assert node.state("a") == "cold"
    node.loaded("b")
    node.finish_all()


def test_a_crash_during_the_pause_loses_nothing() -> None:
    node = contended(host_tier_slots=100)
    node.note_kv("cpu:0", "a", 4 * MIB)
    node.sleep(1.2)
    assert node.evicts
    node.engine_down("cpu:0")
    assert node.state("a") == "paused"
    node.finish_all()
    assert set(node.ends.values()) == {"finished"}


def test_pinned_models_are_never_paused() -> None:
    node = FakeNode()
    node.register(facts("a", 40), facts("b", 40))
    node.command("pin", "a")
    node.loaded("a")
    node.arrive("a")
    node.arrive("b")
    node.loaded("b")
    node.register(facts("c", 40))
    node.arrive("c")
    node.sleep(100)
    assert all(isinstance(action, actions.RequestsPaused) is False or action.model != "a" for action in node.log)
    assert node.state("a") == "ready"


def test_kv_that_is_quicker_to_copy_than_to_compute_is_saved_and_taken_back() -> None:
    node = contended(host_tier_slots=100)
    node.post(events.PrefillMeasured, model="a", device="cpu:0", num_tokens=100, seconds=0.5)
    node.note_kv("cpu:0", "a", 3 * MIB)
    node.sleep(1.5)
    (evict,) = node.evicts.values()
    assert len(evict.save_slots) == 3, "2 for the bytes, and one for a start that is not theirs"
    node.evicted()
    assert node.view("a").saved_kv_tokens == 2000
    assert node.scheduler.host_tier().slots["kv"] == 2
    node.loaded("b")
    node.finish(3)
    node.evicted("b")
    (load,) = node.loads.values()
    assert load.model == "a"
    assert load.kv_slots == evict.save_slots[:2]
    assert load.kv_index == b"index"
    assert len(load.source_slots) == load.weights_chunks, "and the weights come from host memory too"
    node.loaded("a")
    assert node.view("a").saved_kv_tokens == 0
    assert node.scheduler.host_tier().slots["kv"] == 0


def test_kv_that_is_quicker_to_compute_is_not_saved() -> None:
    node = contended(host_tier_slots=100, copy_bytes_per_s=1e6)
    node.post(events.PrefillMeasured, model="a", device="cpu:0", num_tokens=10_000, seconds=0.5)
    node.note_kv("cpu:0", "a", 3 * MIB)
    node.sleep(40)
    (evict,) = node.evicts.values()
    assert evict.save_slots == ()
