"""Every refusal is a value with a reason, and with Retry-After exactly where trying again can help."""

from __future__ import annotations

import pytest

from scheduler.node.actions import REFUSAL_CODES
from tests.scheduler.node.fake_node import FakeNode, facts


def refused(node: FakeNode, request_id: int) -> tuple[str, bool]:
    refusal = node.refusals[request_id]
    assert refusal.retry_after_s is None or 1 <= refusal.retry_after_s <= 60
    return refusal.code, refusal.retry_after_s is not None


def test_unknown_model() -> None:
    node = FakeNode()
    assert refused(node, node.arrive("nobody")) == ("model_not_found", False)


def test_incomplete_model_until_its_files_are_there() -> None:
    node = FakeNode()
    node.register(facts("a", incomplete="model.safetensors is 10 bytes short"))
    request = node.arrive("a")
    assert refused(node, request) == ("model_incomplete", False)
    assert "10 bytes short" in node.refusals[request].message
    assert node.state("a") == "incomplete"
    node.register(facts("a"))
    node.arrive("a")
    assert node.loads


def test_model_of_a_kind_that_is_not_served_until_its_files_are_others() -> None:
    node = FakeNode()
    node.register(facts("a", unusable="its architecture is not supported"))
    request = node.arrive("a")
    assert refused(node, request) == ("model_unusable", False)
    assert "its architecture is not supported" in node.refusals[request].message
    assert node.state("a") == "refused"
    assert node.scheduler.too_large("a") == ""
    node.register(facts("a", 200))
    assert "200.0 MiB" in node.scheduler.too_large("a")
    node.register(facts("a"))
    node.arrive("a")
    assert node.loads


def test_head_that_drafts_for_other_models() -> None:
    node = FakeNode()
    node.register(facts("a", unusable="it drafts tokens for b", drafts=True))
    request = node.arrive("a")
    assert refused(node, request) == ("model_unusable", False)
    assert "it drafts tokens for b" in node.refusals[request].message
    assert node.state("a") == "head"
    assert node.scheduler.why("a")[-1] == "now head: it drafts tokens for b"


def test_disabled_model() -> None:
    node = FakeNode()
    node.register(facts("a", enabled=False))
    assert node.state("a") == "disabled"
    assert refused(node, node.arrive("a")) == ("model_disabled", False)


def test_full_queue() -> None:
    node = FakeNode()
    node.register(facts("a", max_queued=3), facts("b", max_queued=0))
    for _ in range(3):
        node.arrive("a")
    assert not node.refusals
    assert refused(node, node.arrive("a")) == ("queue_full", True)
    node.loaded("a")
    assert len(node.running) == 3
    node.arrive("a")
    assert len(node.refusals) == 1


def test_no_queue_is_too_full_for_what_was_accepted_before_a_restart() -> None:
    node = FakeNode()
    node.register(facts("a", max_queued=3))
    for _ in range(8):
        node.arrive("a", was_accepted=True)
    assert not node.refusals
    assert refused(node, node.arrive("a")) == ("queue_full", True)


def test_a_request_of_many_sequences_is_taken_whole_or_not_at_all() -> None:
    node = FakeNode()
    node.register(facts("a", max_queued=3))
    whole = node.arrive_whole("a", 10)
    assert not node.refusals
    (refused_one,) = node.arrive_whole("a", 10)
    assert refused(node, refused_one) == ("queue_full", True)
    node.loaded("a")
    while whole[-1] in node.open:
        node.finish(*node.running)
    assert [node.ends[each] for each in whole] == ["finished"] * 10
    node.arrive_whole("a", 10)
    assert len(node.refusals) == 1


def test_max_wait_s_holds_until_the_first_of_many_sequences_runs() -> None:
    node = FakeNode(max_wait_s=5)
    node.register(facts("a", max_sequences=1))
    whole = node.arrive_whole("a", 6)
    node.sleep(6)
    assert refused(node, whole[0]) == ("wait_exceeded", True)
    for part in whole[1:]:
        node.cancel(part)
    node.loaded("a")
    whole = node.arrive_whole("a", 6)
    assert whole[0] in node.running
    node.sleep(6)
    while node.running:
        node.finish(*node.running)
    assert [node.ends[each] for each in whole] == ["finished"] * 6


def test_the_nodes_bound_counts_where_the_model_has_none() -> None:
    node = FakeNode(max_queued_per_model=2)
    node.register(facts("b", max_queued=0))
    assert [node.arrive("b") in node.refusals for _ in range(4)] == [False, False, True, True]


def test_retry_after_of_a_full_queue_follows_the_rate_it_is_served_at() -> None:
    def after(num_served: int) -> float:
        node = FakeNode()
        node.register(facts("a", max_queued=20, max_sequences=1))
        node.arrive("a")
        node.loaded("a")
        for _ in range(num_served):
            node.arrive("a")
            node.finish(next(iter(node.running)))
        while not node.refusals:
            node.arrive("a")
        return next(iter(node.refusals.values())).retry_after_s or 0.0

    assert after(2) > after(200)


def test_waiting_too_long() -> None:
    node = FakeNode(preempt_after_s=1000.0)
    node.register(facts("a", 60), facts("b", 60))
    node.arrive("a")
    node.loaded("a")
    node.sleep(5)
    request = node.arrive("b")
    node.sleep(59)
    assert request in node.open
    node.sleep(1.1)
    assert refused(node, request) == ("wait_exceeded", True)
    assert node.state("a") == "ready", "nobody waits for its room any more"


def test_a_long_run_of_expiries_is_spread_over_events() -> None:
    node = FakeNode(max_queued_per_model=500)
    node.register(facts("a", 60), facts("b", 60, max_queued=500))
    node.arrive("a")
    node.loaded("a")
    for _ in range(300):
        node.arrive("b")
    num_actions = len(node.log)
    node.now += 61
    node.post(type_of_time_passed())
    assert len(node.log) - num_actions <= 40
    node.sleep(0.1)
    assert len(node.refusals) == 300


def type_of_time_passed() -> type:
    from scheduler.node.events import TimePassed

    return TimePassed


def test_a_load_that_failed_for_good() -> None:
    node = FakeNode()
    node.register(facts("a"))
    waiting = node.arrive("a")
    command = node.command("load", "a")
    node.load_fails("model.safetensors: tensor lm_head is cut short", permanent=True)
    assert node.state("a") == "failed"
    assert refused(node, waiting) == ("model_failed", False)
    assert "lm_head" in node.refusals[waiting].message
    assert node.answers[command] is not None
    assert refused(node, node.arrive("a")) == ("model_failed", False)
    node.sleep(10_000)
    assert node.state("a") == "failed"
    node.register(facts("a"))
    assert node.state("a") == "failed", "the same files"
    node.register(facts("a", fingerprint="2"))
    assert node.state("a") == "cold"


def test_loads_that_fail_for_now_are_tried_again_then_quarantined() -> None:
    node = FakeNode()
    node.register(facts("a"))
    waiting = node.arrive("a")
    node.load_fails()
    assert node.state("a") == "cold"
    assert not node.loads
    assert any("tried again" in line for line in node.scheduler.why("a"))
    node.sleep(1.1)
    node.load_fails()
    node.sleep(1.1)
    assert not node.loads, "2 s this time"
    node.sleep(1)
    node.load_fails()
    assert node.state("a") == "failed"
    assert refused(node, waiting) == ("model_failed", True)
    node.sleep(30)
    later = node.arrive("a")
    assert refused(node, later) == ("model_failed", True)
    assert node.refusals[later].retry_after_s == pytest.approx(30, abs=1)
    node.sleep(31)
    assert node.state("a") == "cold"
    node.arrive("a")
    node.load_fails()
    assert node.state("a") == "failed", "one try after a quarantine"
    node.sleep(61)
    assert node.state("a") == "failed", "the second one is twice as long"
    node.sleep(60)
    node.arrive("a")
    node.loaded("a")
    node.finish()
    node.command("unload", "a")
    node.evicted()
    node.arrive("a")
    node.load_fails()
    assert node.state("a") == "cold", "a load that worked wipes the slate"


def test_a_node_that_stops_says_so_whatever_operators_do() -> None:
    node = FakeNode()
    node.register(facts("a"))
    node.command("drain")
    assert refused(node, node.arrive("a")) == ("node_draining", True)
    node.command("drain", stopping=True)
    assert refused(node, node.arrive("a")) == ("server_restarting", True)
    answer = node.answers[node.command("resume")]
    assert answer is not None
    assert answer.code == "server_restarting"
    assert refused(node, node.arrive("a")) == ("server_restarting", True)
    assert node.scheduler.draining


def test_drained_node_and_drained_model() -> None:
    node = FakeNode()
    node.register(facts("a"), facts("b", 20))
    waiting = node.arrive("a")
    done = node.command("drain")
    assert node.answers[done] is None
    assert refused(node, node.arrive("a")) == ("node_draining", True)
    node.loaded("a")
    assert waiting in node.running, "what waited goes on"
    node.command("resume")
    assert node.arrive("a") in node.running
    node.command("drain", "a")
    assert refused(node, node.arrive("a")) == ("model_draining", True)
    assert node.arrive("b") in node.open
    node.command("resume", "a")
    assert node.arrive("a") in node.running


def test_no_room_beside_pinned_models() -> None:
    node = FakeNode()
    node.register(facts("p", 60, pinned=True), facts("a", 60), facts("small", 20))
    node.loaded("p")
    request = node.arrive("a")
    assert refused(node, request)[0] == "would_not_fit"
    assert "pinned models (p)" in node.refusals[request].message
    assert node.arrive("small") in node.open
    node.command("unpin", "p")
    assert node.arrive("a") in node.open


def test_removed_model() -> None:
    node = FakeNode()
    node.register(facts("a", max_sequences=1))
    running = [node.arrive("a"), node.arrive("a")]
    node.loaded("a")
    waiting = node.arrive("a")
    node.remove("a")
    assert refused(node, waiting) == ("model_removed", False)
    assert refused(node, node.arrive("a")) == ("model_removed", False)
    assert set(node.running) == set(running)
    assert not node.evicts
    node.finish()
    node.evicted()
    assert node.scheduler.snapshot() == []
    assert refused(node, node.arrive("a")) == ("model_not_found", False)


def test_every_code_is_one_of_the_listed() -> None:
    """fake_node checks each refusal; here: the list itself has no duplicates of meaning left unused by the scheduler."""
    import pathlib

    import scheduler.node

    source = "".join(
        path.read_text() for path in pathlib.Path(scheduler.node.__path__[0]).glob("*.py") if path.name != "actions.py"
    )
    assert [code for code in REFUSAL_CODES if f'"{code}"' not in source] == []
