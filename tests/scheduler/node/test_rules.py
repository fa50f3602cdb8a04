"""The first nine rules of docs/design/models.md, each from somebody's outage."""

from __future__ import annotations

import pytest

from scheduler.node import actions, events
from tests.scheduler.node.fake_node import MIB, FakeNode, facts


def node_of(*weights_mib: int, **settings: float) -> FakeNode:
    """One device of 100 MiB and models a, b, c ... of the given sizes."""
    node = FakeNode(**settings)
    node.register(*(facts(name, mib) for name, mib in zip("abcdef", weights_mib, strict=False)))
    return node


def overdue_victim(**settings: float) -> FakeNode:
    """`a` is busy with request 1 and drains, because request 2 for `b` is overdue."""
    node = node_of(60, 60, **settings)
    node.arrive("a")
    node.loaded("a")
    node.arrive("b")
    node.sleep(11)
    assert node.state("a") == "draining"
    return node


def test_rule_1_a_draining_victim_is_not_revived_by_requests() -> None:
    node = overdue_victim()
    late = node.arrive("a")
    assert late not in node.running, "submitted to a victim"
    assert node.state("a") == "draining"
    node.finish(1)
    assert [evict.model for evict in node.evicts.values()] == ["a"]
    node.evicted()
    node.loaded("b")
    assert set(node.running) == {2}
    node.finish(2)
    node.evicted()
    node.loaded("a")
    assert set(node.running) == {late}, "the victim is placed again for what waited"


def test_rule_1_a_dropped_placement_gives_its_victim_back() -> None:
    node = overdue_victim()
    late = node.arrive("a")
    node.cancel(2)
    assert node.state("a") == "ready"
    assert set(node.running) == {1, late}
    assert not node.evicts


def test_rule_1_an_evict_that_was_sent_is_not_taken_back() -> None:
    node = node_of(60, 60)
    node.bring_up("a")
    waiting = node.arrive("b")
    assert node.evicts
    node.cancel(waiting)
    node.evicted()
    assert node.state("a") == "cold"
    assert not node.loads
    assert node.lease["cpu:0"] == 48, "all but the work space"


def test_rule_2_what_can_never_fit_is_refused_at_registration() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:1": 80}, up=False)
    node.register(facts("big", 94), facts("fits", 90))
    view = node.view("big")
    assert view.state == "refused"
    for part in (str(94 * MIB), "94.0 MiB", "4.0 MiB", "2048 tokens", "cpu:0 has 104857600", "cpu:1 has 83886080", "too little"):
        assert part in view.reason
    request = node.arrive("big")
    assert node.ends[request] == "model_too_large"
    assert node.refusals[request].retry_after_s is None
    assert node.state("fits") == "cold"


def test_rule_2_counts_reserved_kv_and_work_space() -> None:
    node = FakeNode()
    node.register(facts("kv", 60, max_model_len=40 * 1024), facts("floor", 60, kv_floor_tokens=40 * 1024))
    node.register(facts("work", 60, work_space_bytes=40 * MIB))
    node.register(facts("both", 60, kv_floor_tokens=20 * 1024, work_space_bytes=10 * MIB))
    assert [node.state(name) for name in ("kv", "floor", "work", "both")] == ["refused", "refused", "refused", "cold"]


def test_rule_2_is_judged_again_when_files_change() -> None:
    node = FakeNode()
    node.register(facts("m", 200))
    assert node.state("m") == "refused"
    node.register(facts("m", 20, fingerprint="2"))
    assert node.state("m") == "cold"
    node.register(facts("m", 200, fingerprint="3"))
    assert node.state("m") == "refused"


def test_rule_3_running_requests_end_before_their_model_leaves() -> None:
    node = overdue_victim(preempt_after_s=1000.0)
    node.sleep(500)
    assert not node.evicts, "evicted under a running request"
    assert set(node.running) == {1}
    third = node.arrive("b")
    node.finish(1)
    node.evicted()
    node.loaded("b")
    assert node.ends[2] == "wait_exceeded"
    assert set(node.running) == {third}


def test_rule_4_a_ready_model_never_waits_for_a_load() -> None:
    node = node_of(30, 30)
    node.bring_up("a")
    node.arrive("b")
    assert node.loads
    for _ in range(8):
        assert node.arrive("a") in node.running
    over = node.arrive("a")
    assert over not in node.running, "beyond the engine's window of 2 x max_sequences"
    node.finish(1 + 1)
    assert over in node.running


def test_rule_5_one_ledger_owns_every_chunk() -> None:
    node = node_of(40, 30)
    # 50 chunks of 2 MiB, 2 of them work space
    assert node.lease["cpu:0"] == 48
    node.arrive("a")
    load = node.loads[1]
    assert (load.weights_chunks, load.kv_reserved_chunks, load.lease_chunks) == (20, 2, 26)
    node.loaded("a")
    node.arrive("b")
    assert node.loads[2].lease_chunks == 26 - 15 - 2
    (device,) = node.scheduler.devices()
    assert device.held == {"a": 22, "b": 17}
    assert device.lease_chunks == device.total_chunks - device.work_space_chunks - 22 - 17
    node.load_fails(permanent=True)
    assert node.lease["cpu:0"] == 26, "what the load gave back is lent again"


def test_rule_6_a_load_past_its_deadline_is_rolled_back() -> None:
    node = node_of(40)
    request = node.arrive("a")
    command = node.command("load", "a")
    node.sleep(19)
    assert node.loads
    node.sleep(2)
    assert not node.loads
    assert node.evicts[1].model == "a"
    assert node.ends[request] == "load_timeout"
    assert node.refusals[request].retry_after_s
    assert node.answers[command] is not None
    assert node.scheduler.health() == [], "one stuck load is not the node's illness"
    node.evicted()
    assert node.state("a") == "cold"
    assert not node.restarts


def test_rule_6_an_overdue_roll_back_restarts_the_engine_and_shows() -> None:
    node = node_of(40, 20)
    node.arrive("a")
    node.sleep(20.5)
    node.sleep(11)
    assert node.restarts == ["cpu:0"]
    (problem,) = node.scheduler.health()
    assert "cpu:0" in problem
    assert "roll-back of a" in problem
    node.engine_down("cpu:0")
    assert node.scheduler.health(), "until the engine is back"
    node.engine_up("cpu:0")
    assert node.scheduler.health() == []
    other = node.arrive("b")
    node.loaded("b")
    assert other in node.running


def test_rule_6_the_deadline_counts_from_when_the_victims_have_left() -> None:
    node = overdue_victim()
    node.finish(1)
    node.sleep(5)
    node.evicted()
    assert next(iter(node.loads.values())).deadline_s == 20
    started = node.now
    node.sleep(19)
    assert node.state("b") == "loading"
    assert node.scheduler.next_deadline() == pytest.approx(started + 20)


def test_rule_6_the_deadline_follows_what_loads_take() -> None:
    node = node_of(40)
    node.arrive("a")
    node.loaded("a", seconds=30)
    node.finish()
    node.command("unload", "a")
    node.evicted()
    node.arrive("a")
    assert next(iter(node.loads.values())).deadline_s == 120
    fixed = FakeNode(load_deadline_s=7.0)
    fixed.register(facts("a"))
    fixed.arrive("a")
    assert fixed.loads[1].deadline_s == 7


def test_rule_6_compiling_kernels_is_no_loads_time() -> None:
    node = node_of(40)
    request = node.arrive("a")
    (load,) = node.loads.values()
    for _ in range(4):
        node.sleep(10)
        node.post(events.LoadProgressed, placement_id=load.placement_id, bytes_done=0, bytes_total=0)
    node.sleep(5)
    node.loaded("a", seconds=46, kernels_s=45)
    assert node.state("a") == "ready"
    assert "45.00 s of it for kernels" in str(node.scheduler.why("a"))
    node.finish(request)
    node.command("unload", "a")
    node.evicted()
    node.arrive("a")
    assert next(iter(node.loads.values())).deadline_s == 20, "the next load has its kernels"


def step_on(node: FakeNode, seconds: int, *devices: str) -> None:
    """The devices' engines are in one step for so long, which is told every second."""
    since = node.now
    for _ in range(seconds):
        node.sleep(1)
        for device in devices:
            node.post(events.StepLasts, device=device, since=since)


def test_rule_6_a_long_step_is_no_loads_time() -> None:
    node = node_of(40, max_wait_s=1000.0)
    step_on(node, 5, "cpu:0")
    node.arrive("a")
    (load,) = node.loads.values()
    began_s = node.now
    step_on(node, 25, "cpu:0")
    step_on(node, 25, "cpu:0")
    assert node.scheduler.next_deadline() == pytest.approx(began_s + 50 + load.deadline_s)
    node.sleep(5)
    node.loaded("a")
    assert node.state("a") == "ready"
    assert not node.restarts


def test_rule_6_a_step_that_began_before_a_load_gives_it_no_more_than_the_rest() -> None:
    node = node_of(40)
    node.sleep(30)
    since = node.now - 30
    node.arrive("a")
    node.sleep(3)
    node.post(events.StepLasts, device="cpu:0", since=since)
    node.sleep(19)
    assert node.state("a") == "loading"
    node.sleep(2)
    assert node.evicts[1].model == "a", "20 s and the 3 of the step"


def test_rule_6_a_long_step_is_no_evictions_time() -> None:
    node = node_of(40, 20)
    node.arrive("a")
    node.loaded("a")
    node.finish()
    node.command("unload", "a")
    step_on(node, 60, "cpu:0")
    node.sleep(9)
    assert not node.restarts
    node.sleep(2)
    assert node.restarts == ["cpu:0"], "the engine had 10 s besides in which it could answer"


def test_rule_6_a_step_of_two_devices_counts_once() -> None:
    node = FakeNode({"cpu:0": 60, "cpu:1": 60, "cpu:2": 60})
    node.register(facts("pair", 30, num_ranks=2, devices=("cpu:0", "cpu:1")))
    node.arrive("pair")
    step_on(node, 30, "cpu:0", "cpu:1", "cpu:2")
    node.sleep(19)
    assert node.state("pair") == "loading"
    node.sleep(2)
    assert node.state("pair") == "draining"


def compile_kernels(node: FakeNode, seconds: int) -> None:
    """The load under way waits for its kernels, and its engine tells so every second."""
    (load,) = node.loads.values()
    for _ in range(seconds):
        node.sleep(1)
        node.post(events.LoadProgressed, placement_id=load.placement_id, bytes_done=0, bytes_total=0)


def test_compiling_kernels_is_no_time_that_a_request_waits() -> None:
    node = node_of(40, max_wait_s=30.0, load_deadline_s=1000.0)
    before = node.arrive("a")
    node.sleep(10)
    compile_kernels(node, 100)
    meanwhile = node.arrive("a")
    compile_kernels(node, 100)
    node.sleep(5)
    later = node.arrive("a")
    node.sleep(16)
    assert not node.refusals
    node.sleep(2)
    assert node.refusals.keys() == {before}, "it has waited 30 s besides"
    node.sleep(10)
    assert node.refusals.keys() == {before, meanwhile}
    node.loaded("a")
    assert later in node.running


def test_compiling_a_models_kernels_is_no_time_that_requests_of_others_wait() -> None:
    node = FakeNode({"cuda:0": 100, "cuda:1": 100, "cuda:2": 100}, max_wait_s=30.0, load_deadline_s=1000.0)
    node.register(facts("a", devices=("cuda:0",)), facts("b", devices=("cuda:0", "cuda:1")), facts("c", devices=("cuda:2",)))
    node.register(facts("d", devices=("cuda:1",)), facts("e", devices=("cuda:2",)))
    node.arrive("a")
    compile_kernels(node, 2)
    for name in "dbce":
        node.arrive(name)
    compiled = next(load for load in node.loads.values() if load.model == "a")
    for _ in range(50):
        node.sleep(1)
        node.post(events.LoadProgressed, placement_id=compiled.placement_id, bytes_done=0, bytes_total=0)
    assert sorted(refusal.message.split()[4] for refusal in node.refusals.values()) == ["c", "d", "e"]
    node.loaded("a")
    node.loaded("b")
    assert node.state("b") == "ready"


def test_a_load_that_tells_no_more_that_it_waits_for_kernels_keeps_nobody_waiting() -> None:
    node = node_of(40, max_wait_s=30.0, load_deadline_s=1000.0)
    request = node.arrive("a")
    compile_kernels(node, 20)
    node.sleep(28)
    assert request in node.open
    node.sleep(5)
    assert node.refusals[request].code == "wait_exceeded"


def test_rule_7_only_as_much_as_is_needed_leaves() -> None:
    node = node_of(20, 40, 20, 44)
    node.bring_up("a", "b", "c")
    node.now += 1
    node.arrive("d")
    # a (20 MiB) goes first, being as worthless as the others and longest unused; with b it suffices, and then a is not needed
    assert [evict.model for evict in node.evicts.values()] == ["b"]
    assert node.state("a") == node.state("c") == "ready"


def test_rule_7_nothing_is_evicted_while_there_is_room_and_idle_models_stay() -> None:
    node = node_of(20, 20)
    node.bring_up("a")
    node.sleep(10_000)
    node.arrive("b")
    assert not node.evicts
    assert node.state("a") == "ready"


def test_rule_7_pinned_models_never_leave() -> None:
    node = node_of(40, 40, 40)
    node.command("pin", "a")
    node.loaded("a")
    node.bring_up("b")
    for _ in range(5):
        node.arrive("b")
        node.finish()
    node.arrive("c")
    assert [evict.model for evict in node.evicts.values()] == ["b"], "b is worth more, but a is pinned"


def test_rule_7_the_least_valuable_idle_model_leaves() -> None:
    node = node_of(40, 40, 40)
    node.bring_up("a", "b")
    for _ in range(5):
        node.arrive("a")
        node.finish()
    node.arrive("b")
    node.finish()
    node.arrive("c")
    assert [evict.model for evict in node.evicts.values()] == ["b"]


def test_rule_7_a_model_that_becomes_idle_spares_a_busy_one() -> None:
    node = node_of(40, 40, 40)
    node.arrive("a")
    node.loaded("a")
    node.arrive("b")
    node.loaded("b")
    node.arrive("c")
    node.sleep(11)
    (busy,) = [name for name in "ab" if node.state(name) == "draining"]
    (other,) = {"a", "b"} - {busy}
    waiting = node.arrive(busy)
    node.finish(1 if other == "a" else 2)
    assert [evict.model for evict in node.evicts.values()] == [other]
    assert node.state(busy) == "ready"
    assert waiting in node.running


def test_rule_8_most_waiting_work_per_reload_second_loads_first() -> None:
    node = node_of(90, 80, 20, 80)
    node.arrive("a")  # loads; the others wait
    node.arrive("b")
    few = [node.arrive("c"), node.arrive("c")]
    many = [node.arrive("d") for _ in range(3)]
    node.loaded("a")
    node.finish()
    node.evicted()
    assert next(iter(node.loads.values())).model == "d", "3 requests for about 0.3 s beat 2 for 0.2 s"
    node.loaded("d")
    assert set(many) == set(node.running), "all that wait for a model start together"
    assert not set(few) & set(node.running)


def test_rule_8_overdue_requests_go_first_by_age() -> None:
    node = node_of(90, 80, 80)
    node.arrive("a")
    node.now += 1
    node.arrive("b")
    node.now += 1
    for _ in range(5):
        node.arrive("c")
    node.sleep(12)
    node.loaded("a")
    node.finish()
    node.evicted()
    assert next(iter(node.loads.values())).model == "b"


def test_rule_8_one_load_at_a_time_on_a_device_and_several_requests_share_it() -> None:
    node = node_of(20, 20)
    requests = [node.arrive("a") for _ in range(5)]
    node.arrive("b")
    assert len(node.loads) == 1
    node.loaded("a")
    assert set(requests) == set(node.running)
    assert len(node.loads) == 1
    assert sum(isinstance(action, actions.Load) for action in node.log) == 2


def test_rule_9_a_busy_model_has_its_time_before_it_is_made_to_leave() -> None:
    node = node_of(60, 60, 30, overdue_after_s=1.0, tenure_s=5.0)
    node.bring_up("c")
    node.arrive("a")
    node.arrive("b")
    node.evicted()
    node.loaded("a")
    came_at = node.now
    node.sleep(4.9)
    assert node.state("a") == "ready", "b is overdue, a has come just now"
    assert node.scheduler.next_deadline() == pytest.approx(came_at + 5.0)
    node.sleep(0.2)
    assert node.state("a") == "draining"


def test_rule_9_not_before_the_waiting_work_is_overdue() -> None:
    node = node_of(60, 60)
    node.arrive("a")
    node.loaded("a")
    node.arrive("b")
    node.sleep(9.9)
    assert node.state("a") == "ready"
    assert node.scheduler.next_deadline() == pytest.approx(110.3, abs=0.1)


def test_rule_9_idle_evictions_are_free() -> None:
    node = node_of(60, 60)
    for name in "abababab":
        node.now += 0.1
        request = node.arrive(name)
        node.evicted()
        node.loaded(name, seconds=0.1)
        assert request in node.running
        node.finish()


def test_rule_9_what_took_long_to_load_stays_longer() -> None:
    node = node_of(60, 60)
    node.arrive("a")
    node.arrive("b")
    node.loaded("a", seconds=10)
    node.sleep(19.9)
    assert node.state("a") == "ready"
    node.sleep(0.2)
    assert node.state("a") == "draining", "2 x 10 s have passed"


def test_deadlines_that_have_become_void_do_no_harm() -> None:
    node = overdue_victim()
    node.finish()
    node.evicted()
    node.loaded("b")
    node.finish()
    node.sleep(1000)
    assert node.post(events.TimePassed) == []
    assert node.scheduler.next_deadline() is None
