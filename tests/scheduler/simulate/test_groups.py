"""Models that are split over several simulated devices."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from daemon.simulate.generate import generate
from daemon.simulate.trace_shape import TraceShape
from scheduler.node import events
from scheduler.node.actions import Load
from scheduler.node.events import ModelFacts
from scheduler.node.node_scheduler import NodeScheduler
from scheduler.simulate.baselines import LeastRecentlyUsed, OnDemand
from scheduler.simulate.compare import HEARTHD, POLICIES, compare, run_policy
from scheduler.simulate.costs import Costs
from scheduler.simulate.engine import SimulatedEngine
from scheduler.simulate.simulation import SimulatedNode, Simulation
from tests.scheduler.simulate.settings import STEPS
from tests.scheduler.simulate.test_engine import COSTS, facts, outcome
from tests.scheduler.simulate.test_simulation import MEASURED, MIB, SETTINGS, trace


def node(num_devices: int = 2, room_for: int = 1, num_pairs: int = 1, names: str = "ab") -> SimulatedNode:
    """Single models, and pairs p0, p1, ... whose shares are as large as a single model."""
    whole = {name: ModelFacts(name, 100 * MIB, 1024, MIB, 1024, max_queued=10**6) for name in names}
    pairs = {f"p{at}": replace(whole[names[0]], name=f"p{at}", num_ranks=2) for at in range(num_pairs)}
    models = whole | pairs
    costs = Costs(evict_s=0.0, models=dict.fromkeys(models, MEASURED))
    devices = {f"cpu:{at}": (102 * room_for + 20) * MIB for at in range(num_devices)}
    return SimulatedNode(devices, MIB, models, costs, STEPS, host_tier_bytes=1000 * MIB)


def two(*models: str) -> tuple[SimulatedEngine, SimulatedEngine]:
    """Two engines; "a" is split over both and the others are on the second one."""
    leader, follower = SimulatedEngine(COSTS, STEPS), SimulatedEngine(COSTS, STEPS)
    leader.host(replace(facts("a"), num_ranks=2), 1000, followers=[follower])
    for name in models:
        follower.host(facts(name), 1000)
    return leader, follower


def run(*engines: SimulatedEngine) -> dict[int, float]:
    """Request -> when it ended."""
    ends: dict[int, float] = {}
    for _ in range(10_000):
        times = [(at, number) for number, engine in enumerate(engines) if (at := engine.next_at()) is not None]
        if not times:
            return ends
        at, number = min(times)
        engines[number].advance(at)
        ends.update({one.request_id: at for one in engines[number].ended})
        engines[number].ended.clear()
    raise AssertionError("no end")


def test_a_step_occupies_both_devices() -> None:
    leader, follower = two()
    leader.submit(outcome(0))
    assert leader.next_at() == pytest.approx(0.11)
    assert follower.next_at() == leader.next_at()
    assert run(leader, follower) == {0: pytest.approx(0.11 + 10 * 0.011)}


def test_it_waits_for_the_follower_and_takes_turns_with_its_models() -> None:
    leader, follower = two("b")
    follower.submit(outcome(1, "b", output_tokens=101))
    follower.advance(0.0)
    assert follower.next_at() is not None
    leader.submit(outcome(0))
    ends = run(leader, follower)
    alone_s = 0.11 + 10 * 0.011
    assert ends[0] == pytest.approx(2 * alone_s, rel=0.1), "a step of the other model before each of its own"
    assert ends[1] == pytest.approx(alone_s + 0.11 + 100 * 0.011, rel=0.1)


def test_what_it_decodes_has_no_kv_but_its_reserve() -> None:
    leader, _ = two()
    leader.set_lease(10**9)
    for at in range(10):
        leader.submit(outcome(at))
    leader.advance(0.5)
    assert leader.kv_bytes()["a"] <= 1000
    assert leader.waiting()["a"] > 0


def test_models_of_a_follower_pool_no_turns_with_one_that_is_led_elsewhere() -> None:
    leader, follower = two("b")
    for number in range(2):
        leader.submit(outcome(number))
        follower.submit(outcome(10 + number, "b"))
    leader.next_at()
    led, own = leader.hosted["a"], follower.hosted["b"]
    led.backlogged = own.backlogged = True
    assert led.num_running
    assert follower._turns_of(own, [own]) == 1, "a follower does not know how much there is to do elsewhere"


def test_a_follower_is_free_once_the_model_has_left() -> None:
    leader, follower = two("b")
    leader.submit(outcome(0))
    leader.next_at()
    leader.end_step_of("a")
    leader.drop("a")
    follower.submit(outcome(1, "b"))
    assert run(leader, follower) == {1: pytest.approx(0.11 + 0.11 + 10 * 0.011)}


@pytest.mark.parametrize("policy", [HEARTHD, "lru", "ollama", "clairvoyant"])
def test_a_load_a_hit_and_a_swap(policy: str) -> None:
    run = run_policy(policy, node(), trace((0, "p0"), (5, "p0"), (10, "a"), (20, "p0")), SETTINGS)
    assert [one.missed for one in run.outcomes] == [True, False, True, True]
    copied_s = node().costs.host_load_s(node().models["p0"])
    assert [one.wait_s for one in run.outcomes] == [pytest.approx(wait) for wait in (1.11, 0.11, 1.11, 0.11 + copied_s)]
    assert run.swaps.num_evictions == 2
    assert (run.swaps.disk_bytes, run.swaps.host_bytes) == ((2 + 1) * 100 * MIB, 2 * 100 * MIB), "both shares are kept"
    assert run.swaps.num_host_loads == 1


@pytest.mark.parametrize("policy", [HEARTHD, "lru"])
def test_a_pipeline_is_also_on_devices_of_other_hosts(policy: str) -> None:
    """A whole model and one whose matrices are divided are not, and neither is a whole pipeline."""
    simulated = node(names="a")
    pipeline = replace(simulated.models["p0"], num_stages=2)
    for devices, refusals in ((["cpu:0", "cpu:0@b"], ["", ""]), (["cpu:0@b", "cpu:1@b"], ["model_too_large"] * 2)):
        there = replace(simulated, devices=dict.fromkeys(devices, 122 * MIB), models={**simulated.models, "p0": pipeline})
        run = run_policy(policy, there, trace((0, "p0"), (20, "a")), SETTINGS)
        assert [one.refusal for one in run.outcomes] == refusals
    divided = replace(simulated, devices=dict.fromkeys(["cpu:0", "cpu:0@b"], 122 * MIB))
    assert [one.refusal for one in run_policy(policy, divided, trace((0, "p0")), SETTINGS).outcomes] == ["model_too_large"]


def test_baselines_take_this_machines_devices_first() -> None:
    decider = OnDemand(LeastRecentlyUsed(), MIB)
    for name in ("cpu:0@b", "cpu:1", "cpu:0"):
        decider.handle(events.EngineUp(now=0.0, cause="boot", device=name, budget_bytes=122 * MIB))
    pipeline = replace(node().models["p0"], num_stages=2)
    decider.handle(events.ModelRegistered(now=0.0, cause="boot", facts=pipeline))
    request = events.RequestFacts(1, "p0", 10, 10)
    (load,) = decider.handle(events.RequestArrived(now=1.0, cause="req-1", request=request))
    assert isinstance(load, Load)
    assert list(load.leases) == ["cpu:0", "cpu:1"]


@pytest.mark.parametrize("policy", POLICIES)
def test_everybody_is_served_and_two_runs_are_equal(policy: str) -> None:
    simulated = node(num_devices=3, room_for=2, num_pairs=3, names="abc")
    made = generate(TraceShape(tuple(simulated.models), 3.0, 15.0, burst_s=5.0, active_share=0.4))
    runs = [run_policy(policy, simulated, made, SETTINGS) for _ in range(2)]
    assert all(one.finished_s is not None and not one.refusal for one in runs[0].outcomes)
    assert [one.finished_s for one in runs[0].outcomes] == [one.finished_s for one in runs[1].outcomes]


def test_the_scheduler_is_valid_throughout() -> None:
    simulated = node(num_devices=3, num_pairs=3)
    made = generate(TraceShape(tuple(simulated.models), 3.0, 15.0, burst_s=5.0, active_share=0.4))
    scheduler = NodeScheduler(SETTINGS, simulated.devices)
    handle = scheduler.handle
    counted = itertools.count()

    def checked(event):  # type: ignore[no-untyped-def]
        done = handle(event)
        if next(counted) % 20 == 0:
            scheduler.validate()
        return done

    scheduler.handle = checked  # type: ignore[method-assign]
    assert all(one.finished_s is not None for one in Simulation(simulated, scheduler, made).run().outcomes)


def test_too_few_devices_refuse_it() -> None:
    for policy in (HEARTHD, "lru"):
        outcomes = run_policy(policy, node(num_devices=1), trace((0, "p0"), (1, "a")), SETTINGS).outcomes
        assert [one.refusal for one in outcomes] == ["model_too_large", ""]


def test_the_bound_counts_all_shares() -> None:
    simulated = node(num_pairs=2)
    found = compare(simulated, trace((0, "p0"), (10, "p1"), (20, "p0")), SETTINGS, 1.0, [HEARTHD])
    assert found.fewest_loads == 3
    assert found.policies[0].swaps.num_disk_loads + found.policies[0].swaps.num_host_loads == 3
