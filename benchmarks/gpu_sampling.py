"""Measures what sampling settings cost inside a step of a 1B model, where the sampling kernel weighs most: the step's time over the
greedy step's. Steps with penalties or log-probabilities go on from the graph's hidden states, and run one at a time. One JSON line
each.

usage: python -m benchmarks.gpu_sampling [--tiny]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.gpu_pipeline import pipelined
from benchmarks.gpu_shapes import Bench
from engine.protocol import SamplingParams
from scheduler.batch.plan import BatchPlan, write_sampling

ROWS, CONTEXT, STEPS = (64, 1), 1024, 40
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k, top_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top_k 1000, top_p": {"temperature": 0.6, "top_k": 1000, "top_p": 0.95},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "log-probabilities": {"temperature": 0.0, "logprobs": 5},
}


def sampled(bench: Bench, num_rows: int, context: int, steps: int) -> None:
    greedy_s = 0.0
    for name, settings in SETTINGS.items():
        length = bench.table.tokens.shape[1]
        for slot in range(num_rows):
            params = SamplingParams(max_tokens=length, ignore_eos=True, seed=slot, **settings)
            write_sampling(bench.table, slot, params, context, length)
            bench.table.num_prompt[slot], bench.table.params[slot] = context, params
        # the host must know each token before it can count it
        known = name in ("penalties", "log-probabilities")

        def plan(at: int, known: bool = known) -> BatchPlan:
            return bench.plan(num_rows, context + at, 1, known=known)

        pipelined(bench, plan, 3)
        took = pipelined(bench, plan, steps)
        greedy_s = greedy_s or took.wall
        line = {"rows": num_rows, "settings": name, "ms": round(took.wall * 1e3, 3), "over_greedy": round(took.wall / greedy_s, 3)}
        line |= {"device_ms": round(took.device * 1e3, 3), "launch_host_us": round(took.host * 1e6, 1)}
        print(json.dumps({"benchmark": "gpu_sampling", "model": bench.name} | line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_sampling", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="interpreted on the CPU, at a size that only shows that this runs")
    if parser.parse_args().tiny:
        sampled(Bench("tiny", "cpu", 2, 64, 0), 2, 20, 2)
        return
    bench = Bench("1b", "cuda", max(ROWS), CONTEXT + STEPS + 8, max(ROWS))
    for num_rows in ROWS:
        sampled(bench, num_rows, CONTEXT, STEPS)


if __name__ == "__main__":
    main()
