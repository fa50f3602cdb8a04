"""Host memory in the simulation: what is loaded from there, what is saved there, and that every policy has the same of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daemon.simulate.generate import generate
from daemon.simulate.trace_shape import TraceShape
from scheduler.node import actions
from scheduler.node.events import Event
from scheduler.node.node_scheduler import NodeScheduler
from scheduler.simulate.compare import HEARTHD, compare, run_policy
from scheduler.simulate.simulation import SimulatedNode, Simulation
from scheduler.simulate.trace import TraceRequest
from tests.scheduler.simulate.test_simulation import MEASURED, MIB, SETTINGS, node, trace


def with_host(slots: int, names: str = "abc", room_for: int = 1) -> SimulatedNode:
    made = node(names, room_for)
    costs = replace(made.costs, models=dict.fromkeys(names, replace(MEASURED, host_load_s=0.25)))
    return replace(made, costs=costs, host_tier_bytes=slots * MIB)


@pytest.mark.parametrize("policy", [HEARTHD, "lru", "ollama", "clairvoyant"])
def test_a_model_comes_back_from_host_memory(policy: str) -> None:
    asked = trace((0, "a"), (5, "b"), (10, "a"))
    run = run_policy(policy, with_host(200), asked, SETTINGS)
    assert [one.submitted_s for one in run.outcomes] == [pytest.approx(1.0), pytest.approx(6.0), pytest.approx(10.25)]
    assert (run.swaps.num_disk_loads, run.swaps.num_host_loads) == (2, 1)
    assert (run.swaps.disk_bytes, run.swaps.host_bytes) == (200 * MIB, 100 * MIB)
    none = run_policy(policy, with_host(99), asked, SETTINGS)
    assert (none.swaps.num_disk_loads, none.swaps.num_host_loads) == (3, 0)
    assert none.outcomes[2].submitted_s == pytest.approx(11.0)


@pytest.mark.parametrize(("policy", "kept"), [("lru", "b"), ("ollama", "b"), ("clairvoyant", "a")])
def test_whose_weights_host_memory_keeps(policy: str, kept: str) -> None:
    """There is room for two: c takes the place of what was used longest ago, or of what is needed latest."""
    other = "b" if kept == "a" else "a"
    asked = trace((0, "a"), (5, "b"), (10, "c"), (20, kept), (30, other))
    outcomes = run_policy(policy, with_host(200), asked, SETTINGS).outcomes
    assert outcomes[3].wait_s == pytest.approx(0.25 + 0.11)
    assert outcomes[4].wait_s == pytest.approx(1.0 + 0.11)


def test_kv_of_what_is_paused_comes_back() -> None:
    """b is overdue after a second; a drains for a second more and is paused. When it is back it computes one token anew, not 61."""
    settings = replace(SETTINGS, overdue_after_s=1.0)
    asked = [TraceRequest(0.0, "a", 10, 1001), TraceRequest(2.0, "b", 10, 11)]

    def ended(slots: int) -> tuple[float, int, int, int]:
        made = with_host(slots)
        quick = replace(made.costs, copy_bytes_per_s=1e6)  # 1,024 bytes a token: a thousand tokens a second, against 100 computed
        run = run_policy(HEARTHD, replace(made, costs=quick), asked, settings)
        swaps = run.swaps
        assert run.outcomes[0].num_resubmissions == 1
        assert run.outcomes[0].finished_s is not None
        return run.outcomes[0].finished_s, swaps.num_preemptions, swaps.saved_kv_tokens, swaps.restored_kv_tokens

    at, num_preemptions, saved, restored = ended(400)
    assert (num_preemptions, saved) == (1, restored)
    assert saved > 200
    without_at, num_preemptions, *none = ended(0)
    assert (num_preemptions, none) == (1, [0, 0])
    assert without_at - at > saved / 100 * 0.9


def test_more_host_memory_changes_what_is_predicted() -> None:
    asked = generate(TraceShape(("a", "b", "c", "d"), 0.5, 400.0, burst_s=5.0, active_share=0.4))
    means = []
    for slots in (0, 400):
        found = compare(with_host(slots, "abcd", 2), asked, SETTINGS, 10.0, (HEARTHD, "lru", "clairvoyant"))
        assert all(one.num_refused == 0 for one in found.policies)
        assert all((one.swaps.num_host_loads > 0) == (slots > 0) for one in found.policies)
        means.append([one.mean_wait_s or 0.0 for one in found.policies])
    assert all(none > much for none, much in zip(*means, strict=True))


def test_the_scheduler_is_valid_throughout() -> None:
    asked = generate(TraceShape(("a", "b", "c", "d"), 4.0, 40.0, burst_s=5.0, active_share=0.4, output_tokens=(16, 400)))
    made = with_host(250, "abcd", 2)
    scheduler = NodeScheduler(replace(SETTINGS, host_tier_slots=250, overdue_after_s=0.5), made.devices)

    class Watched:
        def handle(self, event: Event) -> list[actions.Action]:
            done = scheduler.handle(event)
            scheduler.validate()
            return done

        def next_deadline(self) -> float | None:
            return scheduler.next_deadline()

    swaps = Simulation(made, Watched(), asked).run().swaps
    assert swaps.num_preemptions
    assert swaps.restored_kv_tokens
    assert swaps.num_host_loads
