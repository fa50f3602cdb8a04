"""kill -9 of the engine under 50 streams: how many requests fail or hang (should be none), and when tokens flow again.

First one model with its weights on disk, then three of 125 M parameters that are resident and kept in host memory: these must come
back without a read (what the engine's processes read is told), and when each of them serves again.
usage: python -m benchmarks.crash [--only one|three]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import signal
import tempfile
import time
from typing import Any

import uvloop

from benchmarks.checkpoints import make
from benchmarks.load import Result, drive
from benchmarks.serve import STORE
from benchmarks.server import Server

THREE = ("mid-1", "mid-2", "mid-3")


async def kill_midway(server: Server, delay_s: float) -> float:
    await asyncio.sleep(delay_s)
    (engine,) = server.engines()
    os.kill(engine.pid, signal.SIGKILL)
    return time.perf_counter()


async def scenario(server: Server, models: list[str], num_out: int, delay_s: float) -> tuple[list[Result], float]:
    work = asyncio.wait_for(drive(server.url, models, 50, 50, 128, num_out), 140)
    results, killed = await asyncio.gather(work, kill_midway(server, delay_s))
    return results, killed


def figures(results: list[Result], killed: float, num_out: int) -> dict[str, Any]:
    after = sorted(stamp for r in results for stamp in r.stamps if stamp > killed + 0.05)
    # the first token after the longest silence is the first one of the new engine
    gaps = [(b - a, b) for a, b in zip([killed, *after], after, strict=False)]
    again = max(gaps)[1]
    each = [min((stamp for stamp in r.stamps if stamp >= again), default=again) - killed for r in results]
    return {
        "streams": len(results),
        "running_when_killed": sum(1 for r in results if r.stamps and r.stamps[0] < killed < r.stamps[-1]),
        "failed": sum(not r.ok for r in results),
        "errors": sorted({r.error[:120] for r in results if r.error}),
        "tokens_missing": sum(num_out - r.completion_tokens for r in results),
        "serving_again_s": round(again - killed, 2),
        "all_streams_again_s": round(max(each), 2),
    }


def one() -> dict[str, Any]:
    feather = make(STORE, "feather")
    with Server(feather.parent, ["cpu=2GiB"], ["--dtype", "float32"]) as server:
        server.cli("load", "feather")
        uvloop.run(drive(server.url, ["feather"], 4, 4, 16, 8))
        results, killed = uvloop.run(scenario(server, ["feather"], 400, 1.0))
        status = server.cli("status", "--json")
    return {"benchmark": "crash", **figures(results, killed, 400), "engine_restarts": status["engine_restarts"]}


def three() -> dict[str, Any]:
    mid = make(STORE, "mid")
    with tempfile.TemporaryDirectory(prefix="hearth-crash-", dir=STORE.parent) as place:
        models = pathlib.Path(place)
        for name in THREE:
            (models / name).mkdir()
            for file in mid.iterdir():
                if file.name != "done":
                    os.link(file, models / name / file.name)
        with Server(models, ["cpu=2GiB"], ["--host-tier-bytes", "1GiB"]) as server:
            for name in THREE:
                server.cli("load", name)
            uvloop.run(drive(server.url, list(THREE), 6, 6, 16, 8))
            num_loads = len(_loads(server))
            results, killed = uvloop.run(scenario(server, list(THREE), 64, 6.0))
            again = _loads(server)[num_loads:]
            (engine,) = server.engines()
            read_chars = engine.io_counters().read_chars
            status = server.cli("status", "--json")
    return {
        "benchmark": "crash_host_tier",
        "models": len(THREE),
        **figures(results, killed, 64),
        "loads": [event["model"] for event in again],
        "bytes_read_by_loads": sum(event["bytes_read"] for event in again),
        "load_s": [round(event["seconds"], 3) for event in again],
        "engine_read_chars": read_chars,  # its libraries and messages; the weights of the three are 750 MB
        "engine_restarts": status["engine_restarts"],
    }


def _loads(server: Server) -> list[dict[str, Any]]:
    lines = server.text("events", "--json").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "loaded"]


def run(only: str = "") -> list[dict[str, Any]]:
    return [make_line() for name, make_line in (("one", one), ("three", three)) if only in ("", name)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("one", "three"), default="")
    for line in run(parser.parse_args().only):
        print(json.dumps(line), flush=True)
