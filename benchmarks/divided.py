"""What a model gives that is divided over two devices of one core each: by its matrices (tensor), or by its layers (pipeline).

Beside it stand one device of one core and one of two. decode: tokens a second of streams with short prompts. prompts: tokens a
second of prompts of 448 tokens. busy: the share of the time in which the least busy of the engines has computed, which includes up
to 60 us of spinning for each step that it waits for. usage: python -m benchmarks.divided
[--model mid] [--streams 1,16] [--rounds 2]: one JSON line and a table.
"""

from __future__ import annotations

import argparse
import json
import pathlib
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
from benchmarks.server import Server
from engine.host.processor import this_processor

# how the model is served -> its devices, the threads of each, and its key `parallel`
ONE_CORE, TWO_CORES, TENSOR, PIPELINE = "one core", "two cores", "tensor", "pipeline"
WAYS: dict[str, tuple[int, int, str]] = {
    ONE_CORE: (1, 1, ""),
    TWO_CORES: (1, 2, ""),
    TENSOR: (2, 1, "parallel = { tensor = 2 }\n"),
    PIPELINE: (2, 1, "parallel = { pipeline = 2 }\n"),
}
PROMPT_WORDS, PROMPT_STREAMS = 448, 8


class Node:
    """`with Node("mid", "pipeline") as server:`, with the model ready."""

    def __init__(self, model: str, way: str) -> None:
        self._model, self._way = model, way

    def __enter__(self) -> Server:
        number, threads, parallel = WAYS[self._way]
        self._place = tempfile.TemporaryDirectory(prefix="hearth-divided-")
        config = pathlib.Path(self._place.name) / "node.toml"
        config.write_text(f'[models."{self._model}"]\nspeculator = "none"\n{parallel}')
        folder = make(STORE, self._model).parent
        devices = [f"cpu:{at}=4GiB" for at in range(number)]
        self._server = Server(folder, devices, ["--config", str(config), "--threads", str(threads), "--dtype", "bfloat16"])
        server = self._server.__enter__()
        for words in (16, PROMPT_WORDS):  # loads the model, and records steps of its sizes
            uvloop.run(drive(server.url, [self._model], 16, 16, words, 16))
        return server

    def __exit__(self, *_: object) -> None:
        self._server.__exit__(None, None, None)
        self._place.cleanup()


def _timed(server: Server, model: str, requests: int, streams: int, words: int, tokens: int) -> tuple[list[Result], float, float]:
    """Returns the results of so many requests, the seconds they took, and the least share of it in which an engine was busy."""
    pids = [one["pid"] for one in server.cli("status", "--json")["devices"]]
    before, begin_s = [_cpu_s(pid) for pid in pids], time.perf_counter()
    results = uvloop.run(drive(server.url, [model], requests, streams, words, tokens))
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
    with Node(model, way) as server:
        for number in streams:
            results, wall_s, busy = _timed(server, model, max(4, 2 * number), number, 16, 128)
            rate = sum(each.completion_tokens for each in results) / wall_s
            found[f"decode {number}"] = {"tok_per_s": round(rate, 1), "busy": round(busy, 3)}
        results, wall_s, busy = _timed(server, model, 3 * PROMPT_STREAMS, PROMPT_STREAMS, PROMPT_WORDS, 1)
        rate = sum(each.prompt_tokens for each in results) / wall_s
        found["prompts"] = {"tok_per_s": round(rate, 1), "busy": round(busy, 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mid")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    streams = [int(number) for number in options.streams.split(",")]
    found: dict[str, list[dict[str, dict[str, float]]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, rounds in found.items():
            rounds.append(measure(options.model, way, streams))
            print(way, rounds[-1], file=sys.stderr, flush=True)
    rows = []
    for load in found[ONE_CORE][0]:
        row: dict[str, Any] = {"load": load}
        for way, rounds in found.items():
            best = max((one[load] for one in rounds), key=lambda one: one["tok_per_s"])  # machines are shared: the least disturbed
            row |= {way: best["tok_per_s"], f"{way} busy": best["busy"]}
        row["pipeline over two cores"] = round(row[PIPELINE] / row[TWO_CORES], 3)
        rows.append(row)
    print(json.dumps({"benchmark": "divided", "model": options.model, "processor": this_processor().describe(), "rows": rows}))
    print(f"\n{table(rows, {key: key for key in rows[0]})}")


if __name__ == "__main__":
    main()
