"""Measures what a model gives that is divided over two devices of one core each: by its matrices (tensor), or by its layers
(pipeline), the latter also with its first stage on a device of another host (over hosts), whose part a process on a core of this
machine plays.

Beside it stand one device of one core and one of two. decode: tokens a second of streams with short prompts. prompts: tokens a
second of prompts of 448 tokens. busy: the share of the time in which the least busy of the engines has computed, which includes up
to 60 us of spinning for each step that it waits for. usage: python -m benchmarks.divided
[--model mid] [--streams 1,16] [--rounds 2]: one JSON line and a table.

--moved -1,0,1 compares pipelines whose first stage has so many layers more than hearthd gives it; --under-way 2,3 those with so
many steps under way at a time. They only decode and take turns in each round; their figures are medians, of_usual that of the
ratios to the pipeline as it is in the same round. first_cpu_ms, last_cpu_ms: processor time of the stages' engines for a token,
which other work on the machine hardly changes; weights_mib: of the stage with most.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import psutil
import uvloop

from benchmarks.checkpoints import make
from benchmarks.edited import Edits, edited
from benchmarks.load import Result, drive
from benchmarks.run import table
from benchmarks.serve import STORE
from benchmarks.server import CACHE, Server
from engine.host.child_process import child_environment
from engine.host.processor import this_processor

# how the model is served -> its devices, the threads of each, and its key `parallel`
ONE_CORE, TWO_CORES, TENSOR, PIPELINE, HOSTS = "one core", "two cores", "tensor", "pipeline", "over hosts"
HERE, THERE = ["cpu:0=4GiB", "cpu:1=4GiB"], "cpu:0@b=4GiB"
WAYS: dict[str, tuple[list[str], int, str]] = {
    ONE_CORE: (HERE[:1], 1, ""),
    TWO_CORES: (HERE[:1], 2, ""),
    TENSOR: (HERE, 1, "parallel = { tensor = 2 }\n"),
    PIPELINE: (HERE, 1, "parallel = { pipeline = 2 }\n"),
    HOSTS: ([HERE[0], THERE], 1, "parallel = { pipeline = 2 }\n"),
}
PROMPT_WORDS, PROMPT_STREAMS = 448, 8
NUM_STAGES = 2


def moved(num_layers: int) -> Edits:
    """Returns the edits by which the first of two stages has so many layers more than it would have."""
    if not num_layers:
        return {}
    ends = "    return (*ends[:-1], shape.num_layers)\n"
    return {"loader.sizes.slices": [(ends, f"    ends = (ends[0] + {num_layers}, *ends[1:])\n" + ends)]}


def under_way(number: int) -> Edits:
    """Returns the edits by which `number` steps of two stages are under way at a time."""
    if not (more := number - NUM_STAGES):
        return {}
    return {
        "engine.exchange": [("(num_stages, plan_bytes(rows))", f"(num_stages + {more}, plan_bytes(rows))")],
        "engine.host.stage_memory": [("num_stages * handed", f"(num_stages + {more}) * handed")],
        "engine.memory.group_region": [("self._num_plans % self.num_stages", f"self._num_plans % (self.num_stages + {more})")],
        "engine.memory.stage_link": [
            (".reshape(num_stages - 1, num_stages, handed)", f".reshape(num_stages - 1, num_stages + {more}, handed)"),
            ("_taken % self._num_stages", f"_taken % (self._num_stages + {more})"),
            ("_sent % self._num_stages", f"_sent % (self._num_stages + {more})"),
        ],
        "engine.serve.served_models": [
            ("return self.share.num_stages - 1", f"return self.share.num_stages - 1 + {more}"),
            ("            num_stages=num_stages,", f"            num_stages=num_stages + {more} * (num_stages > 1),"),
        ],
    }


class OtherHost:
    """`hearth lend` on the last core of this machine. settings: what names it to a daemon."""

    def __init__(self, folder: pathlib.Path, models: pathlib.Path) -> None:
        key = folder / "lend.key"
        key.write_text("both hosts know this key\n")
        options = ["--listen", "127.0.0.1:0", "--key-file", str(key), "--models", str(models), "--device", HERE[0]]
        command = [
            sys.executable,
            "-P",
            "-m",
            "daemon.cli",
            "--json",
            "lend",
            *options,
            "--threads",
            "1",
            "--cache-dir",
            str(CACHE),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment())
        os.sched_setaffinity(self._process.pid, {max(os.sched_getaffinity(0))})
        assert self._process.stdout is not None
        address = json.loads(self._process.stdout.readline())["text"].rpartition(" ")[2]
        self.settings = f'[hosts.b]\naddress = "{address}"\nkey_file = "{key}"\n'

    def engine(self) -> int:
        """Returns the process id of the engine there."""
        below = psutil.Process(self._process.pid).children()
        return next(process.pid for process in below if process.name().startswith("engine "))

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


class Node:
    """`with Node("mid", "pipeline") as node:`, with the model ready."""

    def __init__(self, model: str, way: str, edits: Edits | None = None, warm_words: tuple[int, ...] = (16, PROMPT_WORDS)) -> None:
        """warm_words: of the prompts that load the model and record steps of their sizes."""
        self._model, self._way, self._edits, self._warm_words = model, way, edits or {}, warm_words
        self._other: OtherHost | None = None

    def __enter__(self) -> Node:
        self._stack = ExitStack()
        self._stack.enter_context(edited(self._edits))
        devices, threads, parallel = WAYS[self._way]
        self._place = tempfile.TemporaryDirectory(prefix="hearth-divided-")
        place = pathlib.Path(self._place.name)
        folder = make(STORE, self._model).parent
        settings = f'[models."{self._model}"]\nspeculator = "none"\n{parallel}'
        if THERE in devices:
            self._other = OtherHost(place, folder)
            settings += self._other.settings
        config = place / "node.toml"
        config.write_text(settings)
        self._server = Server(folder, devices, ["--config", str(config), "--threads", str(threads), "--dtype", "bfloat16"])
        self.url = self._server.__enter__().url
        for words in self._warm_words:
            uvloop.run(drive(self.url, [self._model], 16, 16, words, 16))
        return self

    def engines(self) -> list[int]:
        """Returns the process ids of the engines."""
        there = [] if self._other is None else [self._other.engine()]
        return [one["pid"] for one in self._server.cli("status", "--json")["devices"] if "@" not in one["name"]] + there

    def weights_mib(self) -> float:
        """Returns what the model's weights have of each device, which is as much as the largest share needs."""
        parts = [part for device in self._server.cli("top", "--json")["devices"] for part in device["parts"]]
        return float(round(max(part["bytes"] for part in parts if part["kind"] == "weights") / (1 << 20), 1))

    def __exit__(self, *_: object) -> None:
        self._server.__exit__(None, None, None)
        if self._other is not None:
            self._other.close()
        self._place.cleanup()
        self._stack.close()


def _timed(node: Node, model: str, requests: int, streams: int, words: int, tokens: int) -> tuple[list[Result], float, list[float]]:
    """Returns the results of so many requests, the seconds they took, and the seconds in which each engine has computed."""
    pids = node.engines()
    before, begin_s = [_cpu_s(pid) for pid in pids], time.perf_counter()
    results = uvloop.run(drive(node.url, [model], requests, streams, words, tokens))
    wall_s = time.perf_counter() - begin_s
    if failed := sum(not each.ok for each in results):
        raise SystemExit(f"{failed} of {len(results)} requests failed")
    return results, wall_s, [_cpu_s(pid) - cpu_s for pid, cpu_s in zip(pids, before, strict=True)]


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def measure(model: str, way: str, streams: list[int]) -> dict[str, dict[str, float]]:
    """Returns the rates of a model that is served in one way, and how busy its engines were."""
    found = {}
    with Node(model, way) as node:
        for number in streams:
            results, wall_s, cpu_s = _timed(node, model, max(4, 2 * number), number, 16, 128)
            rate = sum(each.completion_tokens for each in results) / wall_s
            found[f"decode {number}"] = {"tok_per_s": round(rate, 1), "busy": round(min(cpu_s) / wall_s, 3)}
        results, wall_s, cpu_s = _timed(node, model, 3 * PROMPT_STREAMS, PROMPT_STREAMS, PROMPT_WORDS, 1)
        rate = sum(each.prompt_tokens for each in results) / wall_s
        found["prompts"] = {"tok_per_s": round(rate, 1), "busy": round(min(cpu_s) / wall_s, 3)}
    return found


def compare(model: str, variants: dict[str, Edits], streams: list[int], rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each variant of a pipeline and number of streams that decode; the variant without edits is what the others
    are compared with."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {(name, number): [] for number in streams for name in variants}
    weights: dict[str, float] = {}
    for at in range(rounds):
        turns = list(variants.items())
        for name, edits in turns[at % len(turns) :] + turns[: at % len(turns)]:  # none is always the first
            with Node(model, PIPELINE, edits, warm_words=(16,)) as node:
                weights[name] = node.weights_mib()
                for number in streams:
                    found[name, number].append(_decoded(node, model, number))
                    print(name, number, found[name, number][-1], file=sys.stderr, flush=True)
    usual = next(name for name, edits in variants.items() if not edits)
    rows = []
    for (name, number), runs in found.items():
        ratios = [one["tok_per_s"] / other["tok_per_s"] for one, other in zip(runs, found[usual, number], strict=True)]
        row: dict[str, Any] = {"load": f"decode {number}", "pipeline": name}
        row |= {key: round(statistics.median(one[key] for one in runs), 3) for key in runs[0]}
        row |= {"of_usual": round(statistics.median(ratios), 3), "weights_mib": weights[name]}
        rows.append(row | {"tok_per_s_of_rounds": [one["tok_per_s"] for one in runs]})
    return rows


def _decoded(node: Node, model: str, number: int) -> dict[str, float]:
    """Returns the rate of so many streams, the share of the time in which the less busy stage computed, and the processor time of
    each stage for a token."""
    results, wall_s, (last_s, first_s) = _timed(node, model, max(4, 2 * number), number, 16, 128)  # rank 0 is in the last stage
    tokens = sum(each.completion_tokens for each in results)
    rates = {"tok_per_s": round(tokens / wall_s, 1), "busy": round(min(last_s, first_s) / wall_s, 3)}
    return rates | {"first_cpu_ms": round(1e3 * first_s / tokens, 3), "last_cpu_ms": round(1e3 * last_s / tokens, 3)}


def _tell_compared(options: argparse.Namespace, variants: dict[str, Edits], streams: list[int]) -> None:
    load_before = round(os.getloadavg()[0], 1)
    rows = compare(options.model, variants, streams, options.rounds)
    about = {"processor": this_processor().describe(), "load_1min": [load_before, round(os.getloadavg()[0], 1)]}
    print(json.dumps({"benchmark": "divided", "model": options.model, **about, "rows": rows}))
    print(f"\n{table(rows, {key: key.replace('_', ' ') for key in rows[0]})}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mid")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", default=",".join(WAYS), help="which ones, with commas between")
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument("--moved", default="", metavar="N,N", help="layers that the first stage has more, 0 among them")
    compared.add_argument("--under-way", default="", metavar="N,N", help=f"steps at a time, {NUM_STAGES} among them")
    options = parser.parse_args()
    streams = [int(number) for number in options.streams.split(",")]
    variants = {f"first stage {int(word):+d} layers": moved(int(word)) for word in options.moved.split(",") if word}
    variants |= {f"{word} steps under way": under_way(int(word)) for word in options.under_way.split(",") if word}
    if variants:
        if {} not in variants.values():
            parser.error(f"--moved needs 0 among its numbers, --under-way {NUM_STAGES}")  # what the others are compared with
        _tell_compared(options, variants, streams)
        return
    found: dict[str, list[dict[str, dict[str, float]]]] = {way: [] for way in options.ways.split(",")}
    for _ in range(options.rounds):
        for way, rounds in found.items():
            rounds.append(measure(options.model, way, streams))
            print(way, rounds[-1], file=sys.stderr, flush=True)
    rows = []
    for load in next(iter(found.values()))[0]:
        row: dict[str, Any] = {"load": load}
        for way, rounds in found.items():
            best = max((one[load] for one in rounds), key=lambda one: one["tok_per_s"])  # machines are shared: the least disturbed
            row |= {way: best["tok_per_s"], f"{way} busy": best["busy"]}
        for one, other in ((PIPELINE, TWO_CORES), (HOSTS, PIPELINE)):
            if one in row and other in row:
                row[f"{one} / {other}"] = round(row[one] / row[other], 3)
        rows.append(row)
    print(json.dumps({"benchmark": "divided", "model": options.model, "processor": this_processor().describe(), "rows": rows}))
    print(f"\n{table(rows, {key: key for key in rows[0]})}")


if __name__ == "__main__":
    main()
