"""Measures what a model gives that is divided over two devices of one core each: by its matrices (tensor), or by its layers
(pipeline), the latter also with its first stage on a device of another host (over hosts), whose part a process on a core of this
machine plays.

Beside it stand one device of one core and one of two. decode: tokens a second of streams with short prompts. prompts: tokens a
second of prompts of 448 tokens. busy: the share of the time in which the least busy of the engines has computed, which includes up
to 60 us of spinning for each step that it waits for. usage: python -m benchmarks.divided
[--model mid] [--streams 1,16] [--rounds 2]: one JSON line and a table.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil
import uvloop

from benchmarks.checkpoints import make
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

    def __init__(self, model: str, way: str) -> None:
        self._model, self._way = model, way
        self._other: OtherHost | None = None

    def __enter__(self) -> Node:
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
        for words in (16, PROMPT_WORDS):  # loads the model, and records steps of its sizes
            uvloop.run(drive(self.url, [self._model], 16, 16, words, 16))
        return self

    def engines(self) -> list[int]:
        """Returns the process ids of the engines."""
        there = [] if self._other is None else [self._other.engine()]
        return [one["pid"] for one in self._server.cli("status", "--json")["devices"] if "@" not in one["name"]] + there

    def __exit__(self, *_: object) -> None:
        self._server.__exit__(None, None, None)
        if self._other is not None:
            self._other.close()
        self._place.cleanup()


def _timed(node: Node, model: str, requests: int, streams: int, words: int, tokens: int) -> tuple[list[Result], float, float]:
    """Returns the results of so many requests, the seconds they took, and the least share of it in which an engine was busy."""
    pids = node.engines()
    before, begin_s = [_cpu_s(pid) for pid in pids], time.perf_counter()
    results = uvloop.run(drive(node.url, [model], requests, streams, words, tokens))
    wall_s = time.perf_counter() - begin_s
    if failed := sum(not each.ok for each in results):
        raise SystemExit(f"{failed} of {len(results)} requests failed")
    return results, wall_s, min(_cpu_s(pid) - cpu_s for pid, cpu_s in zip(pids, before, strict=True)) / wall_s


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def measure(model: str, way: str, streams: list[int]) -> dict[str, dict[str, float]]:
    """Returns the rates of a model that is served in one way, and how busy its engines were."""
    found = {}
    with Node(model, way) as node:
        for number in streams:
            results, wall_s, busy = _timed(node, model, max(4, 2 * number), number, 16, 128)
            rate = sum(each.completion_tokens for each in results) / wall_s
            found[f"decode {number}"] = {"tok_per_s": round(rate, 1), "busy": round(busy, 3)}
        results, wall_s, busy = _timed(node, model, 3 * PROMPT_STREAMS, PROMPT_STREAMS, PROMPT_WORDS, 1)
        rate = sum(each.prompt_tokens for each in results) / wall_s
        found["prompts"] = {"tok_per_s": round(rate, 1), "busy": round(busy, 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mid")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", default=",".join(WAYS), help="which ones, with commas between")
    options = parser.parse_args()
    streams = [int(number) for number in options.streams.split(",")]
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
