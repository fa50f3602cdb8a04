"""Streams of models that are disabled or whose folder is gone, while overdue work of other models wants their room."""

from __future__ import annotations

import pytest

from scheduler.node.node_scheduler import SchedulerSettings
from tests.scheduler.node.fake_node import FakeNode, facts, replicas_of

LONG_S = 1000.0


def streaming(num_streams: int = 1, **settings: object) -> FakeNode:
    """Returns a node on which model y, which has the device to itself, has streams: requests 1, 2, ..."""
    node = FakeNode(**settings)  # type: ignore[arg-type]
    node.register(facts("y", 60, max_sequences=num_streams), facts("z", 60), facts("small", 20))
    for _ in range(num_streams):
        node.arrive("y")
    node.loaded("y")
    return node


def pause_y(node: FakeNode) -> int:
    """Lets overdue work of z, which is loaded, take the place of y. Returns z's request."""
    waiting = node.arrive("z")
    node.sleep(20)
    node.evicted("y")
    node.loaded("z")
    assert waiting in node.running
    return waiting


def switch_off(node: FakeNode, how: str) -> None:
    if how == "command":
        node.command("disable", "y")
    else:
        node.register(facts("y", 60, enabled=False))


@pytest.mark.parametrize("how", ["command", "settings"])
def test_overdue_work_pauses_a_disabled_model_and_it_comes_back_for_its_streams(how: str) -> None:
    node = streaming(2)
    switch_off(node, how)
    assert node.state("y") == "draining"
    waiting = pause_y(node)
    assert node.paused == (1, 2)
    assert not node.refusals
    assert node.state("y") == "paused"
    assert "disabled by the operator" in node.view("y").reason
    assert node.ends[node.arrive("y")] == "model_disabled"
    node.finish(waiting)
    node.evicted("z")
    node.loaded("y")
    assert sorted(node.running) == [1, 2]
    assert node.state("y") == "draining"
    assert node.ends[node.arrive("y")] == "model_disabled"
    node.finish(1, 2)
    node.evicted("y")
    assert node.state("y") == "disabled"


def test_a_disabled_model_may_stay_as_long_as_an_enabled_one() -> None:
    """The wait of the others is the same, and the time for which a model that has just come may stay."""
    waits = []
    for disabled in (False, True):
        node = FakeNode()
        node.register(facts("y", 60), facts("z", 60))
        node.arrive("y")
        node.loaded("y", seconds=20.0)  # it may stay for 40 s
        if disabled:
            node.command("disable", "y")
        node.arrive("z")
        begun = node.now
        node.sleep(39)
        assert not node.paused
        while not node.paused:
            node.sleep(0.5)
        waits.append(node.now - begun)
    assert waits[0] == waits[1]


def test_streams_that_find_no_room_at_once_wait_until_others_have_ended() -> None:
    """The model has fewer sequences when it comes back. Its streams are submitted as others end."""
    node = streaming(3)
    node.command("disable", "y")
    waiting = pause_y(node)
    node.register(facts("y", 60, max_sequences=1))
    node.command("disable", "y")
    node.finish(waiting)
    node.evicted("z")
    node.loaded("y")
    assert sorted(node.running) == [1, 2]
    assert node.state("y") == "draining"
    node.finish(1)
    assert sorted(node.running) == [2, 3]
    node.finish(2, 3)
    node.evicted("y")
    assert node.state("y") == "disabled"


def test_a_model_that_is_disabled_while_it_is_paused_keeps_its_streams_alone() -> None:
    node = streaming()
    waiting = pause_y(node)
    new = node.arrive("y")
    node.command("disable", "y")
    assert node.ends == {new: "model_disabled"}
    assert node.state("y") == "paused"
    node.finish(waiting)
    node.evicted("z")
    assert [load.model for load in node.loads.values()] == ["y"]
    node.loaded("y")
    node.finish_all()
    assert node.ends[1] == "finished"
    assert node.state("y") == "disabled"


def test_a_load_for_streams_goes_on_when_the_model_is_disabled_and_ends_with_them() -> None:
    node = streaming()
    waiting = pause_y(node)
    node.finish(waiting)
    node.evicted("z")
    node.command("disable", "y")
    assert node.state("y") == "loading"
    node.cancel(1)
    node.evicted("y")
    assert node.state("y") == "disabled"


def test_a_disabled_model_that_is_enabled_while_it_is_paused_takes_requests_again() -> None:
    node = streaming()
    node.command("disable", "y")
    waiting = pause_y(node)
    node.command("enable", "y")
    new = node.arrive("y")
    assert "disabled" not in node.view("y").reason
    node.finish(waiting)
    node.evicted("z")
    node.loaded("y")
    assert sorted(node.running) == [1, new]
    assert node.state("y") == "ready"


def test_commands_that_wait_for_a_model_are_answered_when_the_settings_disable_it() -> None:
    node = FakeNode()
    node.register(facts("y", 60))
    command = node.command("load", "y")
    switch_off(node, "settings")
    refusal = node.answers[command]
    assert refusal is not None
    assert refusal.code == "model_disabled"
    node.evicted("y")
    assert node.state("y") == "disabled"


@pytest.mark.parametrize("paused", [False, True])
def test_unload_ends_the_streams_of_a_disabled_model(paused: bool) -> None:
    node = streaming()
    node.command("disable", "y")
    if paused:
        pause_y(node)
    command = node.command("unload", "y")
    assert node.ends == {1: "model_disabled"}
    node.evicted("y")
    assert node.answers[command] is None
    assert node.state("y") == "disabled"


def test_paused_streams_of_a_disabled_model_end_if_it_cannot_be_loaded() -> None:
    node = streaming()
    node.command("disable", "y")
    waiting = pause_y(node)
    node.finish(waiting)
    node.evicted("z")
    node.load_fails("damaged file", permanent=True)
    assert node.ends[1] == "model_failed"
    assert "damaged file" in node.refusals[1].message
    assert node.state("y") == "disabled"


def test_streams_of_a_disabled_replica_go_on_at_another_one_or_wait_for_it() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:1": 100})
    node.register(*replicas_of(facts("y", 60, max_sequences=2), 2))
    node.register(*(facts(f"z{at}", 60, devices=(f"cpu:{at}",)) for at in (0, 1)))
    for name in ("y", "y#2"):
        node.arrive("y")
        node.loaded(name)
    node.command("disable", "y")
    node.arrive("z1")
    node.sleep(20)
    node.evicted("y#2")
    node.loaded("z1")
    assert {node.running[request].device for request in (1, 2)} == {"cpu:0"}
    node.arrive("z0")
    node.sleep(20)
    node.evicted("y")
    node.loaded("z0")
    assert node.state("y") == "paused"
    assert node.state("y#2") == "disabled"
    node.finish_all()
    assert set(node.ends.values()) == {"finished"}
    assert node.state("y") == node.state("y#2") == "disabled"


def test_streams_of_a_removed_model_end_for_overdue_work_once_they_had_the_drain_timeout() -> None:
    node = streaming(drain_timeout_s=90.0, max_wait_s=LONG_S)
    node.sleep(10)
    node.remove("y")
    waiting = node.arrive("z")
    node.sleep(89)
    assert set(node.running) == {1}
    node.sleep(2)
    assert node.ends == {1: "model_removed"}
    assert node.refusals[1].message == "the folder of y is gone, and z needs its room"
    node.evicted("y")
    node.loaded("z")
    assert waiting in node.running
    assert "y" not in [view.name for view in node.scheduler.snapshot()]


def test_streams_of_a_removed_model_run_to_their_ends_if_nobody_needs_its_room() -> None:
    node = streaming(drain_timeout_s=0.0)
    node.remove("y")
    small = node.arrive("small")
    node.loaded("small")
    node.sleep(LONG_S)
    assert set(node.running) == {1, small}
    node.finish_all()
    assert set(node.ends.values()) == {"finished"}


def test_a_model_that_is_removed_while_it_drains_for_others_has_the_drain_timeout() -> None:
    """A folder that comes back in time turns the end of its streams into a pause."""
    node = streaming(drain_timeout_s=90.0, max_wait_s=LONG_S)
    node.arrive("z")
    node.sleep(11)
    assert node.state("y") == "draining"
    node.remove("y")
    node.sleep(60)
    assert set(node.running) == {1}
    node.register(facts("y", 60))
    node.sleep(40)
    assert node.paused == (1,)
    assert not node.ends


def test_the_streams_of_a_disabled_model_do_not_keep_a_device_from_a_large_one() -> None:
    """Small models that would fit beside the streams wait while the large one is long overdue."""
    node = FakeNode(max_wait_s=LONG_S)
    node.register(facts("stream", 60), facts("large", 80), facts("small", 20))
    node.arrive("stream")
    node.loaded("stream")
    node.command("disable", "stream")
    large = node.arrive("large")
    node.sleep(40)
    node.evicted("stream")
    node.arrive("small")
    node.loaded("large")
    assert large in node.running
    node.finish_all()
    assert set(node.ends.values()) == {"finished"}


def test_the_drain_timeout_is_a_setting_that_may_change() -> None:
    node = streaming(drain_timeout_s=LONG_S, max_wait_s=LONG_S)
    node.remove("y")
    node.scheduler.reconfigure(SchedulerSettings(drain_timeout_s=5.0, max_wait_s=LONG_S))
    node.arrive("z")
    node.sleep(20)
    assert node.ends == {1: "model_removed"}
