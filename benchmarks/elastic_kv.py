"""Sequences that run at a time when KV memory goes where it is wanted, against the same memory split equally among the models.

Eight null models on the engine's own pool and schedulers; bursts of requests, models by Zipf's law, one step of every busy model a
tick. Both ways see the same arrivals; what differs is who may use which chunk.
usage: python -m benchmarks.elastic_kv [--ticks 6000] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from engine.contracts import LoadTask
from engine.null_runner import NullRunner
from engine.protocol import Configure, LoadModel, SamplingParams
from engine.served_models import ServedModels
from scheduler.batch.request import BatchRequest

NUM_MODELS, MAX_MODEL_LEN, MAX_SEQUENCES = 8, 512, 256
CHUNK_BYTES = 2 << 20
FLOOR_CHUNKS = 9  # a sequence of 512 tokens takes 8
KV_CHUNKS = 240
BURSTS = (20, 80, 320)  # the same number of requests in all
SHAPE = {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 1000}


def arrivals(ticks: int, seed: int, burst: int) -> dict[int, list[tuple[int, int, int]]]:
    """Tick -> (model, prompt tokens, output tokens): bursts of so many requests, one request in two ticks on average."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(NUM_MODELS)]
    found: dict[int, list[tuple[int, int, int]]] = {}
    tick = 0.0
    while (tick := tick + draw.expovariate(1 / (2 * burst))) < ticks:
        (model,) = draw.choices(range(NUM_MODELS), weights)
        requests = [(model, draw.randint(16, 128), draw.randint(16, 128)) for _ in range(burst)]
        found.setdefault(int(tick), []).extend(requests)
    return found


def run(trace: dict[int, list[tuple[int, int, int]]], ticks: int, reserved: int, lease: int) -> dict[str, Any]:
    """reserved: chunks of KV that are each model's own; lease: those of all."""
    configure = Configure("cpu:0", KV_CHUNKS, CHUNK_BYTES, 0, 2048, 16, 10.0, 1, "null", 0.0)
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
    return {"mean_running": running / max(1, busy_ticks), "finished": finished, "left_waiting": waiting, "preempted": preempted}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.elastic_kv", description=__doc__)
    parser.add_argument("--ticks", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for burst in BURSTS:
        trace = arrivals(options.ticks, options.seed, burst)
        static = run(trace, options.ticks, KV_CHUNKS // NUM_MODELS, 0)
        elastic = run(trace, options.ticks, FLOOR_CHUNKS, KV_CHUNKS - NUM_MODELS * FLOOR_CHUNKS)
        row: dict[str, Any] = {"benchmark": "elastic_kv", "burst": burst, "requests": sum(map(len, trace.values()))}
        for name, found in (("static", static), ("elastic", elastic)):
            row |= {f"{name}_{key}": round(value, 1) for key, value in found.items()}
        row["ratio"] = round(elastic["mean_running"] / static["mean_running"], 2)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
