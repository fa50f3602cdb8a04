"""The loop, with the real node scheduler and with the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from daemon.simulate.generate import generate
from daemon.simulate.trace_shape import TraceShape
from scheduler.node import actions
from scheduler.node.events import Event, ModelFacts
from scheduler.node.node_scheduler import NodeScheduler, SchedulerSettings
from scheduler.simulate.compare import ALL_RESIDENT, HEARTHD, POLICIES, compare, run_policy
from scheduler.simulate.costs import Costs, ModelCosts
from scheduler.simulate.outcome import figures, percentile
from scheduler.simulate.simulation import Run, SimulatedNode, Simulation, SimulationError
from scheduler.simulate.trace import TraceRequest
from tests.scheduler.simulate.settings import STEPS

MIB = 1 << 20
SETTINGS = SchedulerSettings(chunk_bytes=MIB, max_wait_s=1e6, max_queued_per_model=10**6)
MEASURED = ModelCosts(disk_load_s=1.0, prefill_tokens_per_s=100.0, decode_step_s=0.01, decode_s_per_sequence=0.0)


def node(names: Sequence[str] = ("a", "b", "c"), room_for: int = 2) -> SimulatedNode:
    models = {name: ModelFacts(name, 100 * MIB, 1024, MIB, 1024, max_queued=10**6) for name in names}
    costs = Costs(evict_s=0.0, models=dict.fromkeys(names, MEASURED))
    return SimulatedNode({"cpu:0": (102 * room_for + 20) * MIB}, MIB, models, costs, STEPS)


def trace(*requests: tuple[float, str]) -> list[TraceRequest]:
    return [TraceRequest(at, model, 10, 11) for at, model in requests]


@pytest.mark.parametrize("policy", [HEARTHD, "lru", "ollama", "clairvoyant"])
def test_a_load_a_hit_and_a_swap(policy: str) -> None:
    run = run_policy(policy, node(room_for=1), trace((0, "a"), (5, "a"), (10, "b")), SETTINGS)
    first, second, third = run.outcomes
    assert (first.missed, second.missed, third.missed) == (True, False, True)
    assert first.submitted_s == pytest.approx(1.0)
    assert first.first_token_s == pytest.approx(1.11)
    assert first.finished_s == pytest.approx(1.21)
    assert second.wait_s == pytest.approx(0.11)
    assert third.wait_s == pytest.approx(1.11)
    assert (run.swaps.num_disk_loads, run.swaps.num_evictions, run.swaps.disk_bytes) == (2, 1, 200 * MIB)


def test_an_idle_model_leaves_after_its_keep_alive() -> None:
    simulated = node(room_for=3)
    models = {name: replace(facts, keep_alive_s=20.0 if name == "a" else inf) for name, facts in simulated.models.items()}
    made = trace((0, "a"), (0, "b"), (15, "a"), (50, "a"), (60, "b"))
    run = run_policy(HEARTHD, replace(simulated, models=models), made, SETTINGS)
    assert [one.missed for one in run.outcomes] == [True, True, False, True, False]
    assert (run.swaps.num_disk_loads, run.swaps.num_evictions) == (3, 1)


def test_all_resident_waits_for_the_device_only() -> None:
    run = run_policy(ALL_RESIDENT, node(room_for=1), trace((0, "a"), (5, "b"), (10, "c")), SETTINGS)
    assert [one.wait_s for one in run.outcomes] == [pytest.approx(0.11)] * 3
    assert not any(one.missed for one in run.outcomes)


@pytest.mark.parametrize("policy", POLICIES)
def test_everybody_is_served_and_two_runs_are_equal(policy: str) -> None:
    made = generate(TraceShape(("a", "b", "c", "d"), 3.0, 60.0, burst_s=5.0, active_share=0.4))

    def once() -> Run:
        return run_policy(policy, node("abcd"), made, SETTINGS)

    run = once()
    assert all(one.finished_s is not None and not one.refusal for one in run.outcomes)
    assert [one.finished_s for one in run.outcomes] == [one.finished_s for one in once().outcomes]


def test_the_scheduler_is_valid_throughout() -> None:
    made = generate(TraceShape(("a", "b", "c", "d"), 4.0, 40.0, burst_s=5.0, active_share=0.4))
    scheduler = NodeScheduler(SETTINGS, node("abcd").devices)

    class Watched:
        def handle(self, event: Event) -> list[actions.Action]:
            done = scheduler.handle(event)
            scheduler.validate()
            return done

        def next_deadline(self) -> float | None:
            return scheduler.next_deadline()

    assert Simulation(node("abcd"), Watched(), made).run().swaps.num_disk_loads > 4


def test_a_model_that_never_fits_is_refused() -> None:
    large = SimulatedNode({"cpu:0": 50 * MIB}, MIB, node().models, node().costs, STEPS)
    for policy in (HEARTHD, "lru"):
        run = run_policy(policy, large, trace((0, "a")), SETTINGS)
        assert run.outcomes[0].refusal == "model_too_large"
        found = figures(policy, run.outcomes, run.swaps, 10.0)
        assert (found.num_refused, found.mean_wait_s, found.slo_attainment) == (1, None, 0.0)


def test_a_model_whose_requests_wait_in_its_engine_makes_room_in_time() -> None:
    """What it costs to pause a model follows from its speed of prompts. If that counted the wait for a place in the batch, pausing
    this model would seem to take minutes, and it would drain until nobody waits for its room any more."""
    simulated = node(("a", "b"), room_for=1)
    models = dict(simulated.models, a=replace(simulated.models["a"], max_sequences=2, max_model_len=8192))
    costs = replace(simulated.costs, models=dict.fromkeys("ab", replace(MEASURED, prefill_tokens_per_s=2000.0)))
    made = [TraceRequest(10.0 * at, "a", 40, 6000) for at in range(50)] + [TraceRequest(405.0, "b", 10, 11)]
    settings = replace(SETTINGS, max_wait_s=60.0)
    run = run_policy(HEARTHD, replace(simulated, models=models, costs=costs), sorted(made, key=lambda one: one.time_s), settings)
    (one,) = [one for one in run.outcomes if one.request.model == "b"]
    assert not one.refusal
    assert run.swaps.num_preemptions == 1


def test_a_decider_that_forgets_a_request_is_found_out() -> None:
    class Forgetful:
        def handle(self, event: Event) -> list[actions.Action]:
            return []

        def next_deadline(self) -> float | None:
            return None

    with pytest.raises(SimulationError, match="1 requests are left"):
        Simulation(node(), Forgetful(), trace((0, "a"))).run()


def test_compare_tells_how_far_it_is() -> None:
    made = generate(TraceShape(("a", "b", "c"), 30.0, 60.0))
    told: list[tuple[str, int, int]] = []
    found = compare(node(), made, SETTINGS, 10.0, ("lru", HEARTHD), lambda *so_far: told.append(so_far))
    assert [one.policy for one in found.policies] == ["lru", HEARTHD]
    assert told == [("lru", 1000, len(made)), (HEARTHD, 1000, len(made))]
    assert found.fewest_loads >= 3


def test_percentile() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile(list(range(1, 101)), 0.99) == 99
    assert percentile([7], 0.99) == 7
    assert percentile([], 0.5) == 0
