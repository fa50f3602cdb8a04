"""What the operator asks for: each answered once, at the right time, by what was really done."""

from __future__ import annotations

import pytest

from tests.scheduler.node.fake_node import COMMANDS, FakeNode, facts


def node_of(**others: object) -> FakeNode:
    node = FakeNode()
    node.register(facts("a", **others), facts("b", 80))
    return node


@pytest.mark.parametrize("verb", sorted(COMMANDS))
def test_unknown_models_are_named(verb: str) -> None:
    node = node_of()
    refusal = node.answers[node.command(verb, "nobody")]
    assert refusal is not None
    assert refusal.code == "model_not_found"
    assert "nobody" in refusal.message


def test_load_waits_for_ready_and_does_not_pin() -> None:
    node = node_of()
    first, second = node.command("load", "a"), node.command("load", "a")
    assert len(node.loads) == 1
    node.loaded("a")
    assert node.answers == {first: None, second: None}
    assert not node.view("a").pinned
    assert node.answers[node.command("load", "a")] is None


def test_load_waits_for_an_engine_no_longer_than_max_wait_s() -> None:
    """The device is lost: its engine has ended and does not come up again."""
    node = FakeNode(max_wait_s=60.0)
    node.register(facts("a", 60), facts("b", 60))
    node.arrive("a")
    node.loaded("a")
    command = node.command("load", "b")
    node.sleep(50)
    node.engine_down("cpu:0")
    node.sleep(59)
    assert command in node.asked
    node.sleep(2)
    refusal = node.answers[command]
    assert refusal is not None
    assert (refusal.code, refusal.message) == ("wait_exceeded", "waited 60 s for an engine (max_wait_s); cpu:0: no engine is up")
    again = node.command("load", "b")
    node.sleep(50)
    node.engine_up("cpu:0")
    node.sleep(100)
    assert again in node.asked, "an engine is up: it waits as long as it must"
    node.finish_all()
    assert node.answers[again] is None


def test_load_of_a_split_model_waits_for_as_many_engines_as_it_needs() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:1": 100}, max_wait_s=60.0)
    node.register(facts("a", num_ranks=2))
    node.engine_down("cpu:1")
    command = node.command("load", "a")
    node.sleep(61)
    refusal = node.answers[command]
    assert refusal is not None
    assert refusal.code == "wait_exceeded"
    assert "cpu:1: no engine is up" in refusal.message


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"weights_mib": 200}, "model_too_large"),
        ({"incomplete": "no weights"}, "model_incomplete"),
        ({"unusable": "no such architecture"}, "model_unusable"),
        ({"unusable": "no such architecture", "weights_mib": 200}, "model_unusable"),
        ({"enabled": False}, "model_disabled"),
    ],
)
def test_load_and_pin_of_what_cannot_be_loaded(change: dict[str, object], code: str) -> None:
    node = FakeNode()
    node.register(facts("a", **change))  # type: ignore[arg-type]
    for verb in ("load", "pin"):
        refusal = node.answers[node.command(verb, "a")]
        assert refusal is not None
        assert refusal.code == code


def test_unload_of_an_idle_model_is_answered_when_it_is_gone() -> None:
    node = node_of()
    node.bring_up("a")
    command = node.command("unload", "a")
    assert command in node.asked
    assert node.state("a") == "draining"
    node.evicted()
    assert node.answers[command] is None
    assert node.state("a") == "cold"
    assert node.answers[node.command("unload", "a")] is None


def test_unload_takes_running_requests_back_and_they_bring_it_back() -> None:
    node = node_of(max_sequences=1)
    requests = [node.arrive("a") for _ in range(3)]
    node.loaded("a")
    command = node.command("unload", "a")
    assert not node.running
    assert [entry.request_id for entry in node.scheduler.queue()] == requests
    node.evicted()
    assert node.answers[command] is None
    assert node.loads, "they bring it back"
    node.loaded("a")
    assert list(node.running) == requests[:2]


def test_an_end_that_was_under_way_when_it_was_unloaded_counts() -> None:
    from scheduler.node.events import RequestFinished

    node = node_of()
    request = node.arrive("a")
    node.loaded("a")
    node.command("unload", "a")
    node.end(request, "finished")
    node.post(RequestFinished, request_id=request)
    node.evicted()
    assert node.state("a") == "cold"
    assert not node.loads


def test_unload_stops_a_load_and_answers_who_waited_for_it() -> None:
    node = node_of()
    load = node.command("load", "a")
    unload = node.command("unload", "a")
    refusal = node.answers[load]
    assert refusal is not None
    assert refusal.code == "unloaded"
    assert [evict.model for evict in node.evicts.values()] == ["a"]
    node.evicted()
    assert node.answers[unload] is None
    assert not node.loads
    node.arrive("a")
    assert node.loads, "no back-off: nothing has failed"


def test_unload_drops_a_placement_that_only_a_command_wanted() -> None:
    node = node_of()
    node.arrive("a")
    node.loaded("a")
    load = node.command("load", "b")
    node.sleep(11)
    assert node.state("a") == "draining"
    assert node.answers[node.command("unload", "b")] is None
    assert node.answers[load] is not None
    assert node.state("a") == "ready"


def test_disable_refuses_what_waits_lets_run_what_runs_then_evicts() -> None:
    node = node_of(max_sequences=1)
    requests = [node.arrive("a") for _ in range(3)]
    node.loaded("a")
    assert node.answers[node.command("disable", "a")] is None
    assert node.ends[requests[2]] == "model_disabled"
    assert set(node.running) == set(requests[:2])
    assert node.state("a") == "draining"
    node.finish()
    node.evicted()
    assert node.state("a") == "disabled"
    assert node.answers[node.command("enable", "a")] is None
    assert node.state("a") == "cold"


def test_disable_stops_a_load() -> None:
    node = node_of()
    load = node.command("load", "a")
    node.command("disable", "a")
    refusal = node.answers[load]
    assert refusal is not None
    assert refusal.code == "model_disabled"
    node.evicted()
    assert node.state("a") == "disabled"


def test_enable_in_time_keeps_the_copy() -> None:
    node = node_of()
    node.arrive("a")
    node.loaded("a")
    node.command("disable", "a")
    node.command("enable", "a")
    assert node.state("a") == "ready"
    assert node.arrive("a") in node.running


def test_disable_of_a_waiting_model_drops_its_placement() -> None:
    node = node_of()
    node.arrive("a")
    node.loaded("a")
    node.arrive("b")
    node.sleep(11)
    node.command("disable", "b")
    assert node.state("a") == "ready"
    assert node.state("b") == "disabled"


def test_changed_files_count_from_the_next_load_on() -> None:
    node = node_of()
    request = node.arrive("a")
    node.loaded("a")
    node.register(facts("a", 20, fingerprint="2"))
    assert request in node.running
    assert node.view("a").weights_bytes == 40 * 2**20
    assert node.arrive("a") in node.running
    node.finish()
    node.command("unload", "a")
    node.evicted()
    node.arrive("a")
    assert next(iter(node.loads.values())).weights_chunks == 10


def test_files_that_become_incomplete_leave_the_copy_serving() -> None:
    node = node_of()
    node.bring_up("a")
    node.register(facts("a", incomplete="gone", fingerprint="2"))
    assert node.arrive("a") in node.running
    node.finish()
    node.command("unload", "a")
    node.evicted()
    assert node.state("a") == "incomplete"


def test_why_tells_of_files_that_could_not_be_served() -> None:
    node = node_of()
    node.register(facts("a", incomplete="config.json is missing", fingerprint=""))
    node.register(facts("a", fingerprint="2"))
    assert "files changed: cannot be served -> 2" in "\n".join(node.scheduler.why("a"))


def test_a_folder_that_comes_back_in_time_keeps_its_copy() -> None:
    node = node_of()
    node.arrive("a")
    node.loaded("a")
    node.remove("a")
    assert node.state("a") == "draining"
    node.register(facts("a"))
    assert node.state("a") == "ready"
    assert node.arrive("a") in node.running


def test_cancelling_costs_nobody_a_place() -> None:
    node = node_of(max_sequences=1)
    requests = [node.arrive("a") for _ in range(6)]
    node.cancel(requests[1])
    node.loaded("a")
    assert list(node.running) == [requests[0], requests[2]]
    node.cancel(requests[0])
    assert list(node.running) == [requests[2], requests[3]]
    node.cancel(requests[4])
    node.finish(requests[2])
    assert list(node.running) == [requests[3], requests[5]]


def test_a_load_nobody_waits_for_any_more_goes_on() -> None:
    node = node_of()
    node.cancel(node.arrive("a"))
    assert node.loads
    node.loaded("a")
    assert node.state("a") == "ready"


def test_why_tells_the_story_and_what_is_waited_for() -> None:
    node = node_of()
    node.arrive("a")
    node.loaded("a")
    second = node.arrive("b")
    assert any("no room beside a (ready, 1 running, 0 queued)" in line for line in node.scheduler.why("b"))
    node.sleep(11)
    assert any("waits for a (1 requests) to finish" in line for line in node.scheduler.why(f"req-{second}"))
    node.finish(1)
    assert any("waits for the eviction of a" in line for line in node.scheduler.why("b"))
    node.evicted()
    story = "\n".join(node.scheduler.why("a"))
    for part in ("new -> cold: registered", "req-1", "cold -> loading", "loading -> ready: loaded in 0.50 s", "makes room for b"):
        assert part in story
    assert node.scheduler.why("1") == ["+0.0 s  request 1 of a: finished"]
    assert node.scheduler.why("nobody") == node.scheduler.why("999") == []


def test_why_says_which_files_were_read() -> None:
    node = node_of()
    node.arrive("a")
    node.loaded("a", read_as="read its packed files: there are no plain ones")
    assert any(line.endswith("read its packed files: there are no plain ones") for line in node.scheduler.why("a"))


def test_reconfigure_applies_at_once_but_not_to_chunks() -> None:
    from scheduler.node.node_scheduler import SchedulerSettings

    node = node_of()
    node.scheduler.reconfigure(SchedulerSettings(max_wait_s=5.0, load_deadline_s=3.0))
    node.arrive("a")
    assert node.loads[1].deadline_s == 3
    assert node.scheduler.next_deadline() == node.now + 3
    with pytest.raises(ValueError, match="chunk_bytes"):
        node.scheduler.reconfigure(SchedulerSettings(chunk_bytes=1))
