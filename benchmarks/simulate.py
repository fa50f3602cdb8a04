"""Runs the simulator on the shipped scenarios, over seeds and over memory; draws docs/simulate/wait.svg.

    python -m benchmarks.simulate [--svg docs/simulate/wait.svg]

Prints a table and one JSON line: for each scenario and seed, without host memory and with as much as the devices have, the miss
rate and the 99th percentile of the wait of the node scheduler, LRU and the clairvoyant, and whether the bars are met (miss rate
half-way from LRU to the clairvoyant; p99 at most 0.7 of LRU's). Beside it the p99 with all models resident, which no order of loads
explains, and how much of their wait the slowest hundredth of hearthd's requests spent until their model was ready.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any

from daemon.simulate import scenario
from daemon.simulate.generate import generate
from scheduler.simulate.compare import ALL_RESIDENT, run_policy, settings_for
from scheduler.simulate.outcome import Figures, RequestOutcome, figures
from scheduler.simulate.simulation import SimulatedNode

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "simulate"
SCENARIOS, SEEDS = ("eight", "sixteen", "sixteen-even"), range(1, 11)
HOST_TIERS = (0, 1)  # times the devices' memory
POLICIES = {"hearthd": "#2a78d6", "lru": "#eb6834", "ollama": "#1baf7a", "clairvoyant": "#8a6fd1"}
SLO_S = 10.0
MEMORY_MIB = (640, 960, 1216, 1472, 1728, 1984, 2240)
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 340, 60, 20, 110, 50


@dataclass(slots=True)
class Judged:
    figures: Figures
    tail_for_loads: float  # of the slowest hundredth's wait the part until their model was ready; the rest is compute


def run(
    name: str, seed: int, policies: Sequence[str], devices: dict[str, int] | None = None, host_tier: int = 0
) -> dict[str, Judged]:
    """`host_tier`: host memory in multiples of the devices'."""
    given = scenario.read(str(FOLDER / f"{name}.toml"))
    assert given.trace is not None
    assert given.chunk_bytes is not None
    devices = devices or given.devices
    steps = scenario.step_settings(given.node_config(devices))
    node = SimulatedNode(devices, given.chunk_bytes, given.models, given.costs, steps, host_tier * sum(devices.values()))
    settings = settings_for(node, 1e9, scenario.MAX_QUEUED)
    trace = generate(replace(given.trace, seed=seed))
    found = {}
    for policy in policies:
        done = run_policy(policy, node, trace, settings)
        found[policy] = Judged(figures(policy, done.outcomes, done.swaps, SLO_S), tail_for_loads(done.outcomes))
    return found


def tail_for_loads(outcomes: Sequence[RequestOutcome]) -> float:
    slowest = sorted(outcomes, key=lambda outcome: outcome.wait_s)[-max(1, len(outcomes) // 100) :]
    missed = [outcome for outcome in slowest if outcome.missed and outcome.submitted_s is not None]
    return sum((one.submitted_s or 0.0) - one.request.time_s for one in missed) / sum(one.wait_s for one in slowest)


def row(name: str, seed: int, host_tier: int) -> dict[str, Any]:
    judged = run(name, seed, (*POLICIES, ALL_RESIDENT), host_tier=host_tier)
    found = {policy: one.figures for policy, one in judged.items()}
    ours, lru, best = found["hearthd"], found["lru"], found["clairvoyant"]
    p99 = (ours.p99_wait_s or 0.0) / (lru.p99_wait_s or 1.0)
    mean = (ours.mean_wait_s or 0.0) / (lru.mean_wait_s or 1.0)
    return {
        "scenario": name,
        "seed": seed,
        "host_tier": host_tier,
        "miss": {policy: round(figures.miss_rate, 4) for policy, figures in found.items()},
        "p99_wait_s": {policy: round(figures.p99_wait_s or 0.0, 2) for policy, figures in found.items()},
        "mean_of_lru": round(mean, 3),
        "p99_of_lru": round(p99, 3),
        "clairvoyant_p99_of_lru": round((best.p99_wait_s or 0.0) / (lru.p99_wait_s or 1.0), 3),
        "all_resident_p99_of_lru": round((found[ALL_RESIDENT].p99_wait_s or 0.0) / (lru.p99_wait_s or 1.0), 3),
        "preemptions": ours.swaps.num_preemptions,
        "tail_for_loads": round(judged["hearthd"].tail_for_loads, 3),
        "miss_met": ours.miss_rate <= (lru.miss_rate + best.miss_rate) / 2,
        "p99_met": p99 <= 0.7,
    }


def curves() -> dict[str, list[float]]:
    """Mean wait in seconds of the first scenario for each size of memory."""
    found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for mib in MEMORY_MIB:
        for policy, one in run("eight", 1, tuple(POLICIES), {"cpu:0": mib << 20}).items():
            found[policy].append(one.figures.mean_wait_s or 0.0)
    return found


def svg(found: dict[str, list[float]]) -> str:
    """Colours that show on light and on dark; text takes the page's own."""
    top_s = max(max(values) for values in found.values()) * 1.05
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(mib: int) -> float:
        return LEFT + wide * (mib - MEMORY_MIB[0]) / (MEMORY_MIB[-1] - MEMORY_MIB[0])

    def y(wait_s: float) -> float:
        return TOP + high * (1 - wait_s / top_s)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        "<title>Mean wait against memory, eight models</title>",
        "<style>text{fill:#666}.grid{stroke:#888;stroke-opacity:.3}@media(prefers-color-scheme:dark){text{fill:#bbb}}</style>",
    ]
    for part in range(5):
        at = top_s * part / 4
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + wide}" y1="{y(at):.1f}" y2="{y(at):.1f}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{at:.1f} s</text>')
    base = TOP + high + 18
    lines += [f'<text x="{x(mib):.1f}" y="{base}" text-anchor="middle">{mib}</text>' for mib in MEMORY_MIB]
    middle = LEFT + wide / 2
    lines.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">memory for eight models of 239 MiB, MiB</text>')
    for number, (policy, values) in enumerate(found.items()):
        points = " ".join(f"{x(mib):.1f},{y(wait):.1f}" for mib, wait in zip(MEMORY_MIB, values, strict=True))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{POLICIES[policy]}" stroke-width="2.5"/>')
        at = TOP + 14 + 20 * number
        start = LEFT + wide + 14
        ends = f'x1="{start}" x2="{start + 16}" y1="{at - 4}" y2="{at - 4}"'
        lines.append(f'<line {ends} stroke="{POLICIES[policy]}" stroke-width="3"/>')
        lines.append(f'<text x="{start + 20}" y="{at}">{policy}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", default="", help="draw the curves into this file")
    options = parser.parse_args()
    rows = [row(name, seed, host_tier) for name in SCENARIOS for host_tier in HOST_TIERS for seed in SEEDS]
    print(f"{'scenario':<13} {'host':>4} {'seed':>4} {'miss':>7} {'LRU':>7} {'clairv.':>7} {'mean/LRU':>9} {'p99/LRU':>8}", end=" ")
    print("clairv. resident  tail for loads  bars met: miss, p99")
    for one in rows:
        rates = " ".join(f"{one['miss'][policy]:>7.3f}" for policy in ("hearthd", "lru", "clairvoyant"))
        print(f"{one['scenario']:<13} {one['host_tier']:>4} {one['seed']:>4} {rates} ", end="")
        print(f"{one['mean_of_lru']:>9} {one['p99_of_lru']:>8} {one['clairvoyant_p99_of_lru']:>7} ", end="")
        print(f"{one['all_resident_p99_of_lru']:>8} {one['tail_for_loads']:>15.0%}  {one['miss_met']} {one['p99_met']}")
    print("geometric means over the seeds")
    for name in SCENARIOS:
        for host_tier in HOST_TIERS:
            some = [one for one in rows if (one["scenario"], one["host_tier"]) == (name, host_tier)]
            means = {
                key: geometric_mean(one[key] for one in some) for key in ("mean_of_lru", "p99_of_lru", "clairvoyant_p99_of_lru")
            }
            met = [sum(one[key] for one in some) for key in ("miss_met", "p99_met")]
            told = ", ".join(f"{key} {value:.2f}" for key, value in means.items())
            print(f"{name:<13} {host_tier:>4} {told}; met: miss {met[0]}, p99 {met[1]} of {len(some)}")
    found = curves()
    if options.svg:
        pathlib.Path(options.svg).write_text(svg(found))
    waits = {policy: [round(value, 3) for value in values] for policy, values in found.items()}
    print(json.dumps({"benchmark": "simulate", "rows": rows, "memory_mib": MEMORY_MIB, "mean_wait_s": waits}))


if __name__ == "__main__":
    main()
