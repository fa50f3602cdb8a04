"""Sequences that run at a time when KV memory goes where it is wanted, against the same memory split equally among the models.

Eight null models on the engine's own pool and schedulers, one step of every busy model a tick. All ways see the same arrivals:
bursts of so many requests, models by Zipf's law, or the trace of docs/simulate/eight.toml, its requests so many times as frequent.
What differs is who may use which chunk: each model its own share, all of them any, or memory without end. Averages are over the
ticks in which anything runs: over all time they are the same, for the same work is done. The endless one is the demand, so `bound`
(it over static) is what any rule could reach, and `of_demand` how much of it this one does.
usage: python -m benchmarks.elastic_kv [--ticks 6000] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.server import ROOT
from daemon.simulate import scenario
from daemon.simulate.generate import generate
from engine.contracts.loads import LoadTask
from engine.null.runner import NullRunner
from engine.protocol import Configure, LoadModel, SamplingParams
from engine.serve.served_models import ServedModels
from scheduler.batch.request import BatchRequest

NUM_MODELS, MAX_MODEL_LEN, MAX_SEQUENCES = 8, 512, 256
CHUNK_BYTES = 2 << 20
FLOOR_CHUNKS = 9  # a sequence of 512 tokens takes 8
KV_CHUNKS, ENDLESS_CHUNKS = 240, 16_384
BURSTS = (20, 80, 320)  # the same number of requests in all
TRACE, TIMES, TICK_S = "docs/simulate/eight.toml", (1, 8, 16, 32), 0.02
SHAPE = {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 1000}


Arrivals = dict[int, list[tuple[int, int, int]]]  # tick -> (model, prompt tokens, output tokens)


def bursts(ticks: int, seed: int, burst: int) -> Arrivals:
    """Returns bursts of so many requests, with one request in two ticks on average."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(NUM_MODELS)]
    found: Arrivals = {}
    tick = 0.0
    while (tick := tick + draw.expovariate(1 / (2 * burst))) < ticks:
        (model,) = draw.choices(range(NUM_MODELS), weights)
        requests = [(model, draw.randint(16, 128), draw.randint(16, 128)) for _ in range(burst)]
        found.setdefault(int(tick), []).extend(requests)
    return found


def shipped_trace(ticks: int, seed: int, times: int) -> Arrivals:
    """The scenario's trace with so many times its requests a second, a tick being a step's time there."""
    shape = scenario.read(str(ROOT / TRACE)).trace
    assert shape is not None
    rate = shape.requests_per_s * times
    requests = generate(replace(shape, requests_per_s=rate, duration_s=ticks * TICK_S, seed=shape.seed + seed))
    names = {name: number for number, name in enumerate(shape.models)}
    found: Arrivals = {}
    for one in requests:
        found.setdefault(int(one.time_s / TICK_S), []).append((names[one.model], one.input_tokens, one.output_tokens))
    return found


def run(trace: Arrivals, ticks: int, reserved: int, lease: int) -> dict[str, Any]:
    """reserved: chunks of KV that are each model's own; lease: those of all."""
    configure = Configure("cpu:0", NUM_MODELS * reserved + lease, CHUNK_BYTES, 0, 2048, 16, 10.0, 1, "null", 0.0)
    models, runner = ServedModels(configure, None), NullRunner(configure)
    models.set_lease(lease)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        for number in range(NUM_MODELS):
            name = f"m{number}"
            spec = LoadModel(1, name, folder, "bfloat16", name, 0, reserved, lease, MAX_MODEL_LEN, MAX_SEQUENCES, [])
            place = models.take_place(spec)
            hosted = runner.load(LoadTask(spec, place.weights, lambda done, total: None, lambda: False))
            models.add(models.make(spec, hosted, place))
    running = finished = busy_ticks = number = 0
    for tick in range(ticks):
        for model, num_prompt, num_output in trace.get(tick, ()):
            number += 1
            tokens = np.random.default_rng(number).integers(0, 1000, num_prompt).astype(np.int32)
            request = BatchRequest(number, tokens, num_prompt, SamplingParams(num_output, seed=number))
            models.by_name[f"m{model}"].scheduler.submit(request)
        for name in models.busy():
            served = models.by_name[name]
            plan = served.scheduler.plan(tick)
            if plan is not None:
                result = served.hosted.execute(plan, served.scheduler.table)
                finished += sum(map(bool, served.scheduler.finish_step(plan, result.ids, result.bad).finish))
        now = sum(served.scheduler.num_running for served in models.by_name.values())
        running += now
        busy_ticks += now > 0
    waiting = sum(len(served.scheduler.waiting) for served in models.by_name.values())
    preempted = sum(served.scheduler.num_preemptions for served in models.by_name.values())
    mean = running / max(1, busy_ticks)
    return {
        "mean_running": mean,
        "busy_share": busy_ticks / ticks,
        "finished": finished,
        "left_waiting": waiting,
        "preempted": preempted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.elastic_kv", description=__doc__)
    parser.add_argument("--ticks", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds: list[tuple[dict[str, object], Any]] = [
        ({"burst": burst}, bursts(options.ticks, options.seed, burst)) for burst in BURSTS
    ]
    kinds += [({"trace": TRACE, "times": times}, shipped_trace(options.ticks, options.seed, times)) for times in TIMES]
    for named, trace in kinds:
        ways = {
            "static": run(trace, options.ticks, KV_CHUNKS // NUM_MODELS, 0),
            "elastic": run(trace, options.ticks, FLOOR_CHUNKS, KV_CHUNKS - NUM_MODELS * FLOOR_CHUNKS),
            "endless": run(trace, options.ticks, FLOOR_CHUNKS, ENDLESS_CHUNKS),
        }
        row: dict[str, Any] = {"benchmark": "elastic_kv", **named, "requests": sum(map(len, trace.values()))}
        for name, found in ways.items():
            row |= {f"{name}_{key}": round(value, 2) for key, value in found.items()}
        running = {name: found["mean_running"] for name, found in ways.items()}
        row["ratio"] = round(running["elastic"] / running["static"], 2)
        row["bound"] = round(running["endless"] / running["static"], 2)
        row["of_demand"] = round(running["elastic"] / running["endless"], 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
