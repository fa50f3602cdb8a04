"""Compares this checkout with another one of this project, in alternating runs of each: start to ready, the first token of a model
that is not loaded, its load without a server, decode steps, and the processor time of all processes per streamed token with the
null runner (a step every 10 ms, no model).

All runs are processes of their own, with the files in the page cache. Within a round both checkouts run one after the other, in an
order that is drawn anew; ratios are of such neighbours, ours over the other's, as the median with the smallest and the largest.
usage: python -m benchmarks.checkouts FOLDER [--rounds 8] [--only ready,first_token,load,step,serving]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import uvloop

from benchmarks import load
from benchmarks.checkpoints import make
from benchmarks.cpu import STORE, server_of
from benchmarks.run import commit_of, machine, table
from benchmarks.serve import wait_quiet
from benchmarks.server import ROOT, without_drafts

LOADED, STEPPED, SERVED = "one-b", "mid", "feather"  # checkpoints of benchmarks.checkpoints
ROWS = (1, 8, 32)
STREAMS, WAVES = (64, 200), 6  # at a time, and requests of each
NUM_IN, NUM_OUT = 128, 128  # words of a prompt, tokens of an answer


def forward(checkout: pathlib.Path, model: str, rows: int, steps: int, prompt: int) -> dict[str, float]:
    """Returns the figures of the checkout's own benchmarks.forward in bfloat16."""
    command = [sys.executable, "-m", "benchmarks.forward", "--model", str(STORE / model), "--rows", str(rows)]
    command += ["--steps", str(steps), "--prompt", str(prompt), "--dtype", "bfloat16"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=600, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def served(checkout: pathlib.Path) -> dict[str, float]:
    """Starts the checkout's daemon. Returns the time from the start of its process to its first 200 from /readyz, and the time from
    a request for a model that is not loaded to its answer of one token."""
    with ExitStack() as stack:
        server = server_of(checkout, ["cpu=6GiB"], stack)
        start_s = time.perf_counter()
        stack.enter_context(server)
        ready_s = time.perf_counter() - start_s
        body = {"model": LOADED, "prompt": "a b c", "max_tokens": 1, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), headers)
        start_s = time.perf_counter()
        with urllib.request.urlopen(asked, timeout=120) as answer:
            answer.read()
        return {"ready_s": ready_s, "first_token_s": time.perf_counter() - start_s}


def serving(checkout: pathlib.Path) -> Iterator[tuple[str, float]]:
    """Starts the checkout's daemon with the null runner and, as in benchmarks.server, without drafts, and waits until it has
    prepared its memory, which happens once and not for each token. Yields the microseconds of processor time per streamed token of
    the whole process tree, by the number of streams. Raises RuntimeError if requests failed or if tokens did not come in events of
    their own."""
    with ExitStack() as stack:
        flags = ["--runner", "null", "--null-step-ms", "10"]
        if "speculator" in (checkout / "config/schema.py").read_text():  # else it drafts nothing
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-bench-")))
            flags += ["--config", str(without_drafts(STORE, folder / "node.toml"))]
        server = stack.enter_context(server_of(checkout, ["cpu=2GiB"], stack, flags))
        uvloop.run(load.measure(server.url, [SERVED], server.pid, 8, 8, NUM_IN, 16))  # loads the model and its tokenizer
        wait_quiet(server.pid)
        for streams in STREAMS:
            found = uvloop.run(load.measure(server.url, [SERVED], server.pid, WAVES * streams, streams, NUM_IN, NUM_OUT))
            if found["failed"] or float(str(found["events_per_token"])) < 0.99:
                raise RuntimeError(f"{checkout}: not a run that counts: {found}")
            yield f"serving_{streams}_streams_us", float(str(found["cpu_us_per_out_token"]))


def figures(checkout: pathlib.Path, only: set[str]) -> Iterator[tuple[str, float]]:
    """Yields the name and value of each figure of one run."""
    if only & {"ready", "first_token"}:
        yield from served(checkout).items()
    if "load" in only:
        yield "load_s", forward(checkout, LOADED, 1, 1, 8)["load_s"]
    if "step" in only:
        for rows in ROWS:
            yield f"step_{rows}_rows_ms", forward(checkout, STEPPED, rows, 60, 64)["step_ms"]
    if "serving" in only:
        yield from serving(checkout)


def measure(other: pathlib.Path, rounds: int, only: set[str]) -> list[dict[str, object]]:
    found: dict[str, dict[pathlib.Path, list[float]]] = {}
    draw = random.Random(1)
    for number in range(-1, rounds):  # the first round compiles kernels and fills the page cache
        pair = [ROOT, other]
        draw.shuffle(pair)
        for checkout in pair:
            for name, value in figures(checkout, only):
                whose = "this" if checkout == ROOT else "other"
                print(f"round {number + 1}, {whose}: {name} {value:.4g}", file=sys.stderr, flush=True)
                if number >= 0:
                    found.setdefault(name, {}).setdefault(checkout, []).append(value)
    lines: list[dict[str, object]] = []
    for name, by_checkout in found.items():
        ours, its = by_checkout[ROOT], by_checkout[other]
        ratios = [mine / one for mine, one in zip(ours, its, strict=True)]
        line = {"this": statistics.median(ours), "other": statistics.median(its), "ratio": statistics.median(ratios)}
        line |= {"least": min(ratios), "most": max(ratios)}
        lines.append({"figure": name} | {key: round(value, 4) for key, value in line.items()})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", default="ready,first_token,load,step,serving")
    args = parser.parse_args()
    other = args.other.resolve()
    for name in (LOADED, STEPPED, SERVED):
        make(STORE, name)
    lines = measure(other, args.rounds, set(args.only.split(",")))
    about = {"benchmark": "checkouts", "this": commit_of(ROOT), "other": commit_of(other), "rounds": args.rounds}
    print(json.dumps(about | machine() | {"figures": lines}))
    print(table(lines, {key: key for key in lines[0]}))


if __name__ == "__main__":
    main()
