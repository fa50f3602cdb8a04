"""Runs one trace with the node scheduler and with the rules of other systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scheduler.node.events import ModelFacts
from scheduler.node.ledger import Size, size_of
from scheduler.node.node_scheduler import NodeScheduler, SchedulerSettings
from scheduler.simulate.baselines import Clairvoyant, LeastRecentlyUsed, Ollama, OnDemand, Rule
from scheduler.simulate.bound import fewest_loads
from scheduler.simulate.outcome import Figures, figures
from scheduler.simulate.simulation import Decider, Run, SimulatedNode, Simulation
from scheduler.simulate.trace import TraceRequest

# the rules of other systems, made for a trace
_RULES: dict[str, Callable[[Sequence[TraceRequest]], Rule]] = {
    "lru": lambda trace: LeastRecentlyUsed(),
    "ollama": lambda trace: Ollama(),
    "clairvoyant": Clairvoyant,
}
HEARTHD, ALL_RESIDENT = "hearthd", "all-resident"  # the node scheduler; a node on which all models fit
POLICIES = (HEARTHD, *_RULES, ALL_RESIDENT)


@dataclass(slots=True)
class Comparison:
    """The figures of all policies, that is, of the node scheduler and the rules that were compared with it. fewest_loads: the
    fewest loads of any rule that loads models on demand and serves the trace's requests in their order. num_events: the number of
    events of all runs, in sum."""

    policies: list[Figures]
    fewest_loads: int
    num_events: int


def compare(
    node: SimulatedNode,
    trace: Sequence[TraceRequest],
    settings: SchedulerSettings,
    slo_s: float,
    policies: Sequence[str] = POLICIES,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Runs a trace with each policy and returns the figures of all runs. policies: names from POLICIES. slo_s: the objective: the
    seconds within which the first token of a request must come. on_progress: called repeatedly with (policy, requests ended,
    requests in all). Raises SimulationError if a run leaves requests that are never served."""
    found = []
    num_events = 0
    for policy in policies:
        run = run_policy(policy, node, trace, settings, None if on_progress is None else _named(on_progress, policy))
        num_events += run.num_events
        found.append(figures(policy, run.outcomes, run.swaps, slo_s))
    sizes = {name: _size_of_all_shares(facts, node.chunk_bytes) for name, facts in node.models.items()}
    total_chunks = sum(budget // node.chunk_bytes for budget in node.devices.values())
    return Comparison(found, fewest_loads(trace, sizes, total_chunks), num_events)


def run_policy(
    policy: str,
    node: SimulatedNode,
    trace: Sequence[TraceRequest],
    settings: SchedulerSettings,
    on_progress: Callable[[int, int], None] | None = None,
) -> Run:
    if policy == ALL_RESIDENT:
        needed = sum((size.chunks + size.work_space_chunks) * node.chunk_bytes for size in _sizes(node))
        devices = {name: budget + needed for name, budget in node.devices.items()}
        node = replace(node, devices=devices, costs=node.costs.without_loads(), host_tier_bytes=0)
    return Simulation(node, decider(policy, node, trace, settings), trace, on_progress).run()


def decider(policy: str, node: SimulatedNode, trace: Sequence[TraceRequest], settings: SchedulerSettings) -> Decider:
    if policy == HEARTHD:
        return NodeScheduler(replace(settings, host_tier_slots=node.host_tier_slots), node.devices)
    rule = LeastRecentlyUsed() if policy == ALL_RESIDENT else _RULES[policy](trace)
    return OnDemand(rule, node.chunk_bytes, node.host_tier_slots)


def settings_for(node: SimulatedNode, max_wait_s: float, max_queued: int) -> SchedulerSettings:
    """Returns settings for the node scheduler: max_wait_s and max_queued as given; chunk size, load overhead and bandwidths of the
    simulated node; defaults for all others."""
    costs = node.costs
    return SchedulerSettings(
        chunk_bytes=node.chunk_bytes,
        max_wait_s=max_wait_s,
        max_queued_per_model=max_queued,
        bandwidth_bytes_per_s=min(costs.disk_bytes_per_s, costs.copy_bytes_per_s),
        copy_bytes_per_s=costs.copy_bytes_per_s,
        load_overhead_s=costs.load_overhead_s,
    )


def _size_of_all_shares(facts: ModelFacts, chunk_bytes: int) -> Size:
    share = size_of(facts, chunk_bytes)
    return replace(share, weights_chunks=share.weights_chunks * facts.num_ranks, kv_chunks=share.kv_chunks * facts.num_ranks)


def _sizes(node: SimulatedNode) -> list[Size]:
    return [size_of(facts, node.chunk_bytes) for facts in node.models.values()]


def _named(on_progress: Callable[[str, int, int], None], policy: str) -> Callable[[int, int], None]:
    return lambda done, total: on_progress(policy, done, total)
