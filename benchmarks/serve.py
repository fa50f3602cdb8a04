"""CPU per output token of the whole process tree at 1 to 200 streams, and what the same forward pass costs bare.

`feather`: a real but near-weightless model, so that serving is what is measured; `serving` = tree less bare forward of this run.
`null`: the null runner paced at 10 ms a step; valid only if SSE events >= 0.99 x tokens (nothing coalesced).
usage: python -m benchmarks.serve [--streams 1,16,64,200] [--only null|feather]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import psutil
import uvloop

from benchmarks.checkpoints import make
from benchmarks.load import measure, tree_cpu_s
from benchmarks.server import ROOT, Server

WAVES = 6  # requests of each stream: two take half a second, of which what happens only once is a tenth
FIRST_LOOK_S, QUIET_SHARE, QUIET_LIMIT_S = 4.0, 0.02, 120.0  # memory is prepared by an engine that has been idle for a while
STORE = ROOT / ".cache" / "checkpoints"


def bare_forward(folder: pathlib.Path, rows: int, context: int) -> dict[str, Any]:
    """The engine's own forward loop at that batch, without daemon, scheduler or sockets: CPU us per decoded and prompt token."""
    command = [sys.executable, "-m", "benchmarks.forward", "--model", str(folder), "--rows", str(rows), "--context", str(context)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def share_of(pid: int, window_s: float) -> float:
    """Returns the share of one core that a process and all below it take during the next window_s seconds."""
    before, start = tree_cpu_s(pid), time.perf_counter()
    time.sleep(window_s)
    return (tree_cpu_s(pid) - before) / (time.perf_counter() - start)


def wait_quiet(pid: int) -> float:
    """Waits until a node that has come up has prepared its free memory, and does nothing any more. Returns how many seconds that
    took."""
    asked_s = time.perf_counter()
    time.sleep(FIRST_LOOK_S)
    while share_of(pid, 2) > QUIET_SHARE and time.perf_counter() - asked_s < QUIET_LIMIT_S:
        pass
    return time.perf_counter() - asked_s


def idle(server: Server, seconds: float = 10.0) -> dict[str, float]:
    """Share of one core while nothing is asked, and resident memory: a model is loaded, its KV and prefix cache hardly used."""
    quiet_after_s, share = wait_quiet(server.pid), share_of(server.pid, seconds)
    engines = [p.memory_info().rss / 1e6 for p in server.engines()]
    return {
        "quiet_after_s": round(quiet_after_s),
        "idle_core_percent": round(100 * share, 2),
        "daemon_rss_mb": round(psutil.Process(server.pid).memory_info().rss / 1e6),
        "engine_rss_mb": round(max(engines)),
    }


def run(kind: str, streams: list[int]) -> list[dict[str, Any]]:
    feather = make(STORE, "feather")
    flags = ["--runner", "null", "--null-step-ms", "10"] if kind == "null" else []
    lines: list[dict[str, Any]] = []
    with Server(feather.parent, ["cpu=2GiB"], flags) as server:
        first = {"benchmark": "serve", "kind": kind, "ready_s": round(server.ready_s, 2)}
        first["daemon_rss_mb_at_ready"] = round(psutil.Process(server.pid).memory_info().rss / 1e6)
        server.cli("load", "feather")
        # first requests parse the tokenizer and touch memory; they are not what is measured
        uvloop.run(measure(server.url, ["feather"], server.pid, 8, 8, 128, 16))
        first |= idle(server)
        for count in streams:
            num = WAVES * count if count > 1 else 4
            line: dict[str, Any] = {"benchmark": "serve", "kind": kind, "streams": count}
            line |= uvloop.run(measure(server.url, ["feather"], server.pid, num, count, 128, 128))
            if kind == "null":
                events = float(line["events_per_token"])
                line["valid"] = events >= 0.99
            lines.append(line)
        status = server.cli("status", "--json")
        first["event_loop_stall_ms_max"] = round(1e3 * status["event_loop_stall_max_s"], 2)
    if kind == "feather":
        for line in lines:
            bare = bare_forward(feather, line["streams"], 230)
            # the same passes: one decode step a token, and the prompt's share
            prompt_us = bare["prefill_cpu_us_per_token"] * line["input_tokens"] / line["output_tokens"]
            line["bare_forward_cpu_us"] = round(bare["cpu_us_per_token"] + prompt_us, 1)
            line["serving_cpu_us"] = round(line["cpu_us_per_out_token"] - line["bare_forward_cpu_us"], 1)
    return [first, *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16,64,200")
    parser.add_argument("--only", choices=["null", "feather"])
    args = parser.parse_args()
    for kind in [args.only] if args.only else ["null", "feather"]:
        for line in run(kind, [int(s) for s in args.streams.split(",")]):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
