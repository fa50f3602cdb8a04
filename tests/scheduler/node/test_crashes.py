"""An engine's death costs nobody a place, and only what kills engines again and again is given up."""

from __future__ import annotations

from tests.scheduler.node.fake_node import FakeNode, facts


def serving(num_requests: int = 5, **others: object) -> FakeNode:
    node = FakeNode()
    node.register(facts("a", **others))
    for _ in range(num_requests):
        node.arrive("a")
    node.loaded("a")
    return node


def test_running_requests_wait_in_front_in_their_order() -> None:
    node = serving(4, max_sequences=2)
    assert list(node.running) == [1, 2, 3, 4]
    node.arrive("a")
    node.engine_down("cpu:0")
    assert node.state("a") == "cold"
    assert [(entry.request_id, entry.resubmission) for entry in node.scheduler.queue()] == [
        (1, True), (2, True), (3, True), (4, True), (5, False),
    ]  # fmt: skip
    assert not node.loads, "nothing is placed until the engine is up"
    node.engine_up("cpu:0")
    node.loaded("a")
    assert list(node.running) == [1, 2, 3, 4]
    node.finish(1)
    assert 5 in node.running


def test_resubmissions_wait_without_limit_and_fill_no_queue() -> None:
    node = serving(5, max_queued=5, max_sequences=8)
    node.engine_down("cpu:0")
    for _ in range(5):
        assert node.arrive("a") in node.open
    assert node.arrive("a") in node.refusals
    node.sleep(200)
    assert sorted(node.open) == [1, 2, 3, 4, 5], "the others have waited too long"
    node.engine_up("cpu:0")
    node.loaded("a")
    assert sorted(node.running) == [1, 2, 3, 4, 5]


def test_a_request_that_was_running_in_two_crashes_ends() -> None:
    node = serving(3)
    node.engine_down("cpu:0", running=(2,))
    node.engine_up("cpu:0")
    node.loaded("a")
    assert sorted(node.running) == [1, 2, 3]
    node.engine_down("cpu:0", running=(2, 3))
    assert node.ends[2] == "crashed_twice"
    assert sorted(node.open) == [1, 3]
    node.engine_up("cpu:0")
    node.loaded("a")
    node.finish(1, 3)


def test_two_such_requests_in_ten_minutes_quarantine_the_model() -> None:
    node = serving(4)
    for _ in range(2):
        node.engine_down("cpu:0", running=(1, 2))
        node.engine_up("cpu:0")
        if node.loads:
            node.loaded("a")
    assert node.state("a") == "failed"
    assert node.ends == {1: "crashed_twice", 2: "crashed_twice", 3: "model_failed", 4: "model_failed"}
    assert node.refusals[3].retry_after_s
    node.sleep(61)
    assert node.state("a") == "cold"


def test_faults_are_forgotten_after_ten_minutes() -> None:
    node = serving(1)
    for _ in range(2):
        for _ in range(2):
            node.engine_down("cpu:0", running=tuple(node.running))
            node.engine_up("cpu:0")
            if node.loads:
                node.loaded("a")
        assert node.state("a") == "cold"
        node.sleep(601)
        node.arrive("a")
        node.loaded("a")


def test_a_death_ends_the_load_and_it_is_tried_again() -> None:
    node = FakeNode()
    node.register(facts("a"))
    waiting = node.arrive("a")
    node.engine_down("cpu:0")
    assert node.state("a") == "cold"
    node.engine_up("cpu:0")
    node.sleep(1.1)
    node.loaded("a")
    assert waiting in node.running


def test_a_load_that_keeps_killing_its_engine_is_given_up() -> None:
    node = FakeNode()
    node.register(facts("a"))
    waiting = node.arrive("a")
    for _ in range(3):
        node.sleep(10)
        assert node.loads
        node.engine_down("cpu:0")
        node.engine_up("cpu:0")
    assert node.state("a") == "failed"
    assert node.ends[waiting] == "model_failed"


def test_a_load_is_not_blamed_for_a_death_in_another_models_step() -> None:
    node = serving(1)
    node.register(facts("b", 20))
    node.arrive("b")
    node.engine_down("cpu:0", running=(1,))
    node.engine_up("cpu:0")
    loading = {load.model for load in node.loads.values()}
    node.loaded()
    loading |= {load.model for load in node.loads.values()}
    assert loading == {"a", "b"}, "both at once: nothing waits to be tried again"


def test_victims_of_a_death_and_their_placement_start_afresh() -> None:
    node = FakeNode()
    node.register(facts("a", 60), facts("b", 60))
    node.arrive("a")
    node.loaded("a")
    node.arrive("b")
    node.sleep(11)
    assert node.state("a") == "draining"
    node.engine_down("cpu:0", running=(1,))
    assert node.state("a") == node.state("b") == "cold"
    node.finish_all()
    assert node.ends == {1: "finished", 2: "finished"}


def test_pinned_models_come_back_by_themselves() -> None:
    node = FakeNode()
    node.register(facts("p", 30, pinned=True))
    node.loaded("p")
    node.engine_down("cpu:0")
    node.engine_up("cpu:0")
    assert [load.model for load in node.loads.values()] == ["p"]


def test_removed_and_disabled_models_do_not_come_back() -> None:
    node = serving(1)
    node.register(facts("b", 20))
    node.arrive("b")
    node.loaded("b")
    node.remove("a")
    node.command("disable", "b")
    assert len(node.running) == 2
    node.engine_down("cpu:0")
    assert node.ends == {1: "model_removed", 2: "model_disabled"}
    node.engine_up("cpu:0")
    assert not node.loads
    assert [view.name for view in node.scheduler.snapshot()] == ["b"]


def test_an_engine_that_comes_up_again_without_a_word_has_lost_everything() -> None:
    node = serving(2)
    node.copies.clear()
    node.memory.clear()
    node.running.clear()
    node.engine_up("cpu:0")
    node.loaded("a")
    assert sorted(node.running) == [1, 2]


def test_an_eviction_without_answer_restarts_the_engine() -> None:
    node = FakeNode()
    node.register(facts("a", 60), facts("b", 60))
    node.bring_up("a")
    waiting = node.arrive("b")
    node.sleep(11)
    assert node.restarts == ["cpu:0"]
    node.engine_down("cpu:0")
    node.engine_up("cpu:0")
    node.loaded("b")
    assert waiting in node.running
