"""Eight mid-sized models with memory for three: a trace replayed against a real daemon, and what the simulator says of it.

Loads are throttled (test_disk_bytes_per_s, test_copy_bytes_per_s) as the scenario says, so that memory is what is tested and not
this machine's page cache. The models are one checkpoint under several names; those with `num_ranks` in the scenario are split over
so many devices. Before the trace the node's own speed is measured (seconds of a load beside its bytes, of a decode step, of a
sequence in it, of a step with a prompt and of its tokens) while another trace like it runs on all devices, of whole and of split
models, on another daemon, for a node keeps in mind who was asked for; the prediction is made with that.
usage: python -m benchmarks.cohost [--scenario docs/simulate/eight.toml] [--trace FILE] [--minutes 20] [--host-tier 1GiB]
       python -m benchmarks.cohost --scenario docs/simulate/eight-split.toml --resident 2 --threads 1 --minutes 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvloop

from benchmarks.checkpoints import link_models, make
from benchmarks.load import Result, percentile, stream_one
from benchmarks.serve import STORE
from benchmarks.server import ROOT, Server
from config.units import parse_bytes
from daemon.simulate import scenario, trace_file
from daemon.simulate.generate import generate
from daemon.simulate.trace_shape import TraceShape
from scheduler.node.events import ModelFacts
from scheduler.simulate.trace import TraceRequest

VOCABULARY = range(300, 30_000)
SPEEDS = ("prefill_tokens_per_s", "prefill_step_s", "decode_step_s", "decode_s_per_sequence")
CALIBRATION_S = 60.0  # of another trace of the same kind, replayed to measure speeds
INTERVAL_S = 0.25


def body(model: str, num_in: int, num_out: int, draw: random.Random) -> dict[str, object]:
    """A prompt of exactly that many tokens, unlike any other."""
    return {
        "model": model,
        "prompt": draw.choices(VOCABULARY, k=num_in),
        "max_tokens": num_out,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(slots=True, frozen=True)
class Counted:
    """The counts of an engine at a moment (time.perf_counter): steps, their device seconds, and generated tokens."""

    at_s: float
    num_steps: float
    seconds: float
    num_tokens: float


def not_negative(rows: np.ndarray, sums: np.ndarray) -> list[float]:
    """Returns the factors of the columns, none below zero, whose products with each row are nearest to the row's sum. The factor
    that is furthest below zero is set to zero until there is none."""
    left = list(range(rows.shape[1]))
    factors = [0.0] * rows.shape[1]
    while left:
        found, *_ = np.linalg.lstsq(rows[:, left], sums, rcond=None)
        if found.min() >= 0:
            for column, factor in zip(left, found, strict=True):
                factors[column] = float(factor)
            break
        del left[int(found.argmin())]
    return factors


class Client:
    def __init__(self, url: str) -> None:
        self._url, where = url, urlsplit(url)
        self._host, self._port = str(where.hostname), int(where.port or 80)
        self._draw = random.Random(1)

    async def ask(self, model: str, num_in: int, num_out: int) -> Result:
        return await stream_one(self._host, self._port, body(model, num_in, num_out, self._draw))

    async def speeds(self, models: list[str], trace: list[TraceRequest]) -> dict[str, float]:
        """Returns the simulator's costs while a trace is replayed that is like the one to be predicted: those with which the steps,
        tokens and prompts of all intervals are nearest to the device seconds that the engine counted. The time between two steps is
        added to a step's. The requests go to these models (as many as fit) by turns."""
        between_s = await self._between_steps(models)
        counting = asyncio.create_task(self._counts(models, trace[-1].time_s))
        results = await self.replay([replace(request, model=models[at % len(models)]) for at, request in enumerate(trace)])
        prompts = [(result.stamps[0], request.input_tokens) for result, request in zip(results, trace, strict=True)]
        rows, sums = [], []
        for before, now in pairwise(await counting):
            computed = [num_tokens for at_s, num_tokens in prompts if before.at_s < at_s <= now.at_s]
            num_steps, num_tokens = now.num_steps - before.num_steps, now.num_tokens - before.num_tokens
            rows.append([num_steps, num_tokens, len(computed), sum(computed)])
            sums.append(now.seconds - before.seconds)
        fixed_s, each_s, prompt_s, token_s = not_negative(np.array(rows, float), np.array(sums))
        values = (1 / max(1e-6, token_s), prompt_s, fixed_s + between_s, each_s)
        return {name: round(value, 6) for name, value in zip(SPEEDS, values, strict=True)}

    async def _counts(self, models: list[str], seconds: float) -> list[Counted]:
        """Returns what was counted at the end of each interval."""
        found = [await self._counted(models)]
        while found[-1].at_s < found[0].at_s + seconds:
            await asyncio.sleep(INTERVAL_S)
            found.append(await self._counted(models))
        return found

    async def _between_steps(self, models: list[str]) -> float:
        """Returns the seconds that pass between two steps while one sequence of each model decodes."""
        asked = [asyncio.create_task(self.ask(each, 16, 320)) for each in models]
        await asyncio.sleep(1.0)  # the prompts are computed
        before = await self._counted(models)
        await asyncio.sleep(1.5)
        after = await self._counted(models)
        if any(task.done() for task in asked):
            raise RuntimeError("the calibration's streams ended before they were measured: give them more tokens")
        await asyncio.gather(*asked)
        return max(0.0, after.at_s - before.at_s - (after.seconds - before.seconds)) / (after.num_steps - before.num_steps)

    async def load_s(self, models: list[str]) -> float:
        """Seconds of a load by itself, as the engine tells them, on average."""
        before = await asyncio.to_thread(scraped, self._url)
        for model in models:
            await self.ask(model, 16, 16)
        after = await asyncio.to_thread(scraped, self._url)
        return float(after["hearth_model_load_seconds_total"] - before["hearth_model_load_seconds_total"]) / len(models)

    async def _counted(self, models: list[str]) -> Counted:
        """Returns what was counted of these models so far; a step counts when it has ended."""
        found, at_s = await asyncio.to_thread(scraped, self._url), time.perf_counter()

        def of(metric: str) -> float:
            return sum(float(found[f'hearth_{metric}{{model="{model}"}}']) for model in models)

        return Counted(at_s, of("steps_total"), of("step_seconds_total"), of("generated_tokens_total"))

    async def replay(self, trace: list[TraceRequest]) -> list[Result]:
        start = time.perf_counter()

        async def one(request: TraceRequest) -> Result:
            await asyncio.sleep(max(0.0, start + request.time_s - time.perf_counter()))
            return await self.ask(request.model, request.input_tokens, request.output_tokens)

        return await asyncio.gather(*[one(request) for request in trace])


def scraped(url: str) -> Counter[str]:
    """Counters of /metrics, summed by name and by name with its labels."""
    with urllib.request.urlopen(url + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        if line.startswith("hearth_"):
            name, value = line.rsplit(" ", 1)
            found[name] += float(value)  # type: ignore[assignment]
            plain = name.partition("{")[0]
            if plain != name:
                found[plain] += float(value)  # type: ignore[assignment]
    return found


@dataclass(slots=True)
class Kind:
    """Models of a scenario with as many ranks, and what was measured of them: the speeds of their steps and seconds of a load."""

    names: list[str]
    num_ranks: int
    speeds: dict[str, float] = field(default_factory=dict)
    load_s: float = 0.0

    @property
    def label(self) -> str:
        """The prefix of the names of its figures in the result."""
        return "" if self.num_ranks == 1 else "split_"


def calibrating(shape: TraceShape) -> list[TraceRequest]:
    """Returns a trace of the same kind to measure speeds with."""
    return [request for request in generate(replace(shape, seed=shape.seed + 1)) if request.time_s < CALIBRATION_S]


def kinds_of(models: Mapping[str, ModelFacts]) -> list[Kind]:
    """Whole models come first."""
    ranks = sorted({facts.num_ranks for facts in models.values()})
    return [Kind(sorted(name for name, facts in models.items() if facts.num_ranks == number), number) for number in ranks]


def measure(server: Server, kind: Kind, num_resident: int, trace: list[TraceRequest]) -> None:
    """Fills in what the kind's loads and steps take. num_resident: models of which steps are measured, all that fit."""
    client, models = Client(server.url), kind.names[:num_resident]
    uvloop.run(client.ask(kind.names[-1], 16, 16))  # the first model of a kind waits for kernels
    kind.load_s = uvloop.run(client.load_s(models))
    kind.speeds = uvloop.run(client.speeds(models, trace))


def predicted(
    folder: pathlib.Path, table: dict[str, Any], trace: pathlib.Path, kinds: list[Kind], flags: list[str]
) -> dict[str, Any]:
    """Returns what `hearth simulate` says of the trace, with the scenario's speeds replaced by those measured here. table: the
    scenario's file; it is changed."""
    rate = min(table["costs"]["disk_bytes_per_s"], table["costs"]["copy_bytes_per_s"])
    whole, *_ = kinds
    whole_bytes = parse_bytes(table["models"][whole.names[0]]["weights_bytes"])
    table["costs"]["load_overhead_s"] = whole.speeds["load_overhead_s"] = round(max(0.0, whole.load_s - whole_bytes / rate), 6)
    for kind in kinds:
        for name in kind.names:
            table["models"][name] |= {speed: kind.speeds[speed] for speed in SPEEDS}
            if kind is not whole:
                table["models"][name]["disk_load_s"] = round(kind.load_s, 6)
    costs = folder / "costs.json"
    costs.write_text(json.dumps(table))
    command = [sys.executable, "-m", "daemon.cli", "simulate", str(trace), "--costs", str(costs), "--json", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"hearth simulate: {done.stderr[-800:]}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def run(options: argparse.Namespace) -> dict[str, Any]:
    path = pathlib.Path(options.scenario)
    known, table = scenario.read(str(path)), tomllib.loads(path.read_text())
    if options.trace:
        with open(options.trace, encoding="utf-8") as file:
            trace = trace_file.read(file, options.trace)
    elif known.trace is not None:
        trace = generate(known.trace)
    else:
        raise SystemExit(f"{path} has no [trace]: name one with --trace")
    trace = [request for request in trace if request.time_s < 60 * options.minutes]
    calibration = calibrating(known.trace or TraceShape(tuple(known.models)))
    names = sorted(known.models)
    costs = table["costs"]
    STORE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hearth-cohost-", dir=STORE.parent) as place:
        folder = pathlib.Path(place)
        models = folder / "models"
        link_models(models, make(STORE, options.checkpoint), *names)
        kinds = kinds_of(known.models)
        flags = ["--host-tier-bytes", options.host_tier, "--max-wait-s", "3600"]
        flags += ["--request-timeout-s", "3600", "--test-disk-bytes-per-s", str(int(costs["disk_bytes_per_s"]))]
        flags += ["--test-copy-bytes-per-s", str(int(costs["copy_bytes_per_s"]))]
        if options.threads:
            flags += ["--threads", str(options.threads)]
        if options.turn_ms:
            flags += ["--turn-budget-ms", str(options.turn_ms)]
        devices = [f"{name}={budget_bytes}" for name, budget_bytes in known.devices.items()]
        for kind in kinds:
            config = node_config(folder / f"{kind.num_ranks}.toml", [known.models[name] for name in kind.names])
            at_once = len(devices) // kind.num_ranks
            with Server(models, devices, [*flags, "--config", config]) as server:
                measure(server, kind, at_once * options.resident, calibration[:: kind.num_ranks])
        config = node_config(folder / "node.toml", known.models.values())
        with Server(models, devices, [*flags, "--config", config]) as server:
            client = Client(server.url)
            before = scraped(server.url)
            start = time.perf_counter()
            results = uvloop.run(client.replay(trace))
            wall_s = time.perf_counter() - start
            counted = scraped(server.url) - before
        replayed = folder / "trace.csv"
        with replayed.open("w", encoding="utf-8") as file:
            trace_file.write(file, trace)
        guess = predicted(
            folder, table, replayed, kinds, ["--policy", "hearthd", "--host-tier", options.host_tier, *options.simulate]
        )
    waits = [result.stamps[0] - result.started for result in results if result.stamps]
    failed = [result for result in results if not result.ok]
    swaps = {name: int(counted[key]) for name, key in _swap_rows(counted)}
    measured = {
        "requests": len(results),
        "mean_wait_s_of": {name: round(wait_s, 3) for name, wait_s in _mean_waits(results).items()},
        "failed": len(failed),
        "errors": sorted({result.error[:120] or str(result.status) for result in failed})[:5],
        "out_of_memory": int(counted["hearth_out_of_memory_total"]),
        "mean_wait_s": round(sum(waits) / max(1, len(waits)), 3),
        "ttft_p50_s": round(percentile(waits, 0.5), 3),
        "ttft_p99_s": round(percentile(waits, 0.99), 3),
        "swaps": swaps,
        "preemptions": int(counted["hearth_model_preemptions_total"]),
        "requests_paused": int(counted["hearth_requests_paused_total"]),
        "load_s": round(counted["hearth_model_load_seconds_total"], 2),
    }
    (policy,) = guess["policies"]
    return {
        "benchmark": "cohost",
        "minutes": options.minutes,
        "host_tier_bytes": parse_bytes(options.host_tier) if options.host_tier != "0" else 0,
        "disk_bytes_per_s": costs["disk_bytes_per_s"],
        "copy_bytes_per_s": costs["copy_bytes_per_s"],
        "turn_budget_ms": options.turn_ms,
        "wall_s": round(wall_s, 1),
        **{kind.label + name: value for kind in kinds for name, value in kind.speeds.items()},
        **measured,
        "predicted_mean_wait_s": policy["mean_wait_s"],
        "measured_over_predicted": round(measured["mean_wait_s"] / policy["mean_wait_s"], 3),
        "predicted": policy,
    }


def _mean_waits(results: list[Result]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for result in results:
        if result.stamps:
            found.setdefault(result.model, []).append(result.stamps[0] - result.started)
    return {name: sum(waits) / len(waits) for name, waits in sorted(found.items())}


def node_config(path: pathlib.Path, models: Iterable[ModelFacts]) -> str:
    """Writes a node's configuration with these models' tables and returns its path."""
    path.write_text("max_queued_per_model = 100000\n" + "".join(map(settings, models)))
    return str(path)


def settings(facts: ModelFacts) -> str:
    """A model's table in the node's configuration."""
    lines = [f'[models."{facts.name}"]', 'speculator = "none"', f"max_model_len = {facts.max_model_len}"]
    lines.append(f"max_sequences = {facts.max_sequences}")
    if facts.num_ranks > 1:
        lines += [f"parallel = {{ tensor = {facts.num_ranks} }}", f"kv_floor_tokens = {facts.kv_floor_tokens}"]
    return "\n".join(lines) + "\n"


def _swap_rows(counted: Counter[str]) -> list[tuple[str, str]]:
    """(direction tier reason, the metric's full name) of all that were counted."""
    found = []
    for key in sorted(counted):
        match = re.fullmatch(r'hearth_swap_(ins|outs)_total\{reason="(\w+)",tier="(\w+)"\}', key)
        match = match or re.fullmatch(r'hearth_swap_(ins|outs)_total\{tier="(\w+)",reason="(\w+)"\}', key)
        if match is not None:
            found.append((" ".join(match.groups()), key))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default=str(ROOT / "docs" / "simulate" / "eight.toml"))
    parser.add_argument("--trace", default="", help="CSV; default: as the scenario makes it")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the trace")
    parser.add_argument("--host-tier", default="0", help="host_tier_bytes of the node")
    parser.add_argument("--checkpoint", default="mid", help="one of benchmarks.checkpoints")
    parser.add_argument("--resident", type=int, default=3, help="whole models that fit on a device")
    parser.add_argument("--threads", type=int, default=0, help="threads of each device; 0: the node's default")
    parser.add_argument("--turn-ms", type=float, default=0.0, help="turn_budget_ms of the node; 0: its default")
    parser.add_argument("--simulate", nargs="*", default=[], help="further options of hearth simulate")
    found = run(parser.parse_args())
    guess = found["predicted"]
    for name in ("requests", "failed", "out_of_memory", "mean_wait_s", "predicted_mean_wait_s", "measured_over_predicted"):
        print(f"{name:<26} {found[name]}")
    for told, p50_s, p99_s in (
        ("time to first token", found["ttft_p50_s"], found["ttft_p99_s"]),
        ("predicted", guess["p50_wait_s"], guess["p99_wait_s"]),
    ):
        print(f"{told:<26} p50 {p50_s:.3f} s, p99 {p99_s:.3f} s")
    print(f"{'swaps':<26} {', '.join(f'{number} {what}' for what, number in found['swaps'].items())}")
    moved = guess["swaps"]
    print(f"{'predicted':<26} {moved['num_disk_loads']} in disk, {moved['num_host_loads']} in host")
    print(f"{'preemptions':<26} {found['preemptions']} of models, {found['requests_paused']} of requests", end="")
    print(f"; predicted {moved['num_preemptions']} of models")
    met = not found["failed"] and not found["out_of_memory"] and 0.8 <= found["measured_over_predicted"] <= 1.25
    print(f"bar: 0 failed, 0 out of memory, measured over predicted 0.8 to 1.25: {'met' if met else 'MISSED'}")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
