"""kill -9 of the engine under 50 streams: how many requests fail or hang (should be none), and when tokens flow again.

First one model with its weights on disk, then three of 125 M parameters that are resident and kept in host memory: these must come
back without a read (what the engine's processes read is told), and when each of them serves again. Then the same three, whose
weights the next engine takes over where they are on the device (`adopt_weights`): what loads copy and take then. The last part has
one model that is split over two devices and two that are whole on the second of them, and kills the engine of the first: it tells
how long the streams of each stand still, and how often those of the whole ones do for more than 100 ms. The engine is killed when
all 50 streams run.
usage: python -m benchmarks.crash [--only one|three|adopted|ranks]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import pathlib
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import uvloop

from benchmarks.checkpoints import link_models, make
from benchmarks.load import Result, drive
from benchmarks.serve import STORE
from benchmarks.server import Server

THREE = ("mid-1", "mid-2", "mid-3")
SPLIT, WHOLE = "split", ("whole-1", "whole-2")
STALL_S = 0.1
STREAMS = 50
FEATHER, MID = (128, 400), (64, 400)  # words in, tokens out: so many that the first stream still runs when the last has begun
TURN_MS = 100  # in a turn of the usual 10 ms each of three busy models decodes but a few streams, and the others wait
ALL_RUN_LIMIT_S, DONE_LIMIT_S, TELL_EVERY_S = 60.0, 140.0, 2.0


async def all_run(followed: list[Result]) -> None:
    """Returns when every stream has begun and none has ended; tells how far they are. Raises RuntimeError where it does not come to
    that."""
    begin_s = told_s = time.perf_counter()
    while True:
        running = sum(bool(result.stamps) and not result.ended for result in followed)
        if running == STREAMS:
            return
        now_s = time.perf_counter()
        if now_s - told_s > TELL_EVERY_S:
            told_s = now_s
            print(f"{running} of {STREAMS} streams run after {now_s - begin_s:.0f} s", file=sys.stderr, flush=True)
        if ended := sum(result.ended for result in followed):
            raise RuntimeError(f"{ended} streams ended before all {STREAMS} ran: their answers are too short for this machine")
        if now_s - begin_s > ALL_RUN_LIMIT_S:
            raise RuntimeError(f"after {ALL_RUN_LIMIT_S:.0f} s only {running} of {STREAMS} streams run")
        await asyncio.sleep(0.02)


async def scenario(server: Server, models: list[str], lengths: tuple[int, int], pid: int = 0) -> tuple[list[Result], float]:
    """Returns the results, and when the engine was killed: as soon as all streams ran. pid: the engine's; 0: there is but one."""
    followed: list[Result] = []
    work = asyncio.create_task(drive(server.url, models, STREAMS, STREAMS, *lengths, followed=followed))
    try:
        await all_run(followed)
        if not pid:
            (engine,) = server.engines()
            pid = engine.pid
        os.kill(pid, signal.SIGKILL)
        killed = time.perf_counter()
        return await asyncio.wait_for(work, DONE_LIMIT_S), killed
    finally:
        work.cancel()


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
        results, killed = uvloop.run(scenario(server, ["feather"], FEATHER))
        status = server.cli("status", "--json")
    return {"benchmark": "crash", **figures(results, killed, FEATHER[1]), "engine_restarts": status["engine_restarts"]}


def three(benchmark: str = "crash_host_tier", *more_flags: str) -> dict[str, Any]:
    mid = make(STORE, "mid")
    with tempfile.TemporaryDirectory(prefix="hearth-crash-", dir=STORE.parent) as place:
        models = pathlib.Path(place)
        link_models(models, mid, *THREE)
        flags = ["--host-tier-bytes", "1GiB", "--turn-budget-ms", str(TURN_MS), *more_flags]
        with Server(models, ["cpu=2GiB"], flags) as server:
            for name in THREE:
                server.cli("load", name)
            uvloop.run(drive(server.url, list(THREE), 6, 6, 16, 8))
            num_loads, copied_s = len(_loads(server)), _copy_seconds(server)
            results, killed = uvloop.run(scenario(server, list(THREE), MID))
            again, copied_s = _loads(server)[num_loads:], _copy_seconds(server) - copied_s
            (engine,) = server.engines()
            read_chars = engine.io_counters().read_chars
            status = server.cli("status", "--json")
    return {
        "benchmark": benchmark,
        "models": len(THREE),
        **figures(results, killed, MID[1]),
        "loads": [event["model"] for event in again],
        "bytes_read_by_loads": sum(event["bytes_read"] for event in again),
        "adopted": sum(event["adopted"] for event in again),
        "copy_s": round(copied_s, 4),
        "load_s": [round(event["seconds"], 3) for event in again],
        "engine_read_chars": read_chars,  # its libraries and messages; the weights of the three are 750 MB
        "engine_restarts": status["engine_restarts"],
    }


def adopted() -> dict[str, Any]:
    return three("crash_adopted", "--adopt-weights", "true")


def ranks() -> dict[str, Any]:
    feather = make(STORE, "feather")
    with tempfile.TemporaryDirectory(prefix="hearth-crash-", dir=STORE.parent) as place:
        models, config = pathlib.Path(place) / "models", pathlib.Path(place) / "node.toml"
        link_models(models, feather, SPLIT, *WHOLE)
        tables = [f'[models."{SPLIT}"]\nspeculator = "none"\nparallel = {{ tensor = 2 }}\n']
        tables += [f'[models."{name}"]\nspeculator = "none"\ndevices = ["cpu:1"]\n' for name in WHOLE]
        config.write_text("".join(tables))
        flags = ["--config", str(config), "--threads", "1", "--dtype", "float32"]
        with Server(models, ["cpu:0=1GiB", "cpu:1=1GiB"], flags) as server:
            names = [SPLIT, *WHOLE]
            for name in names:
                server.cli("load", name)
            uvloop.run(drive(server.url, names, 30, 30, 64, 32))
            victim = next(one["pid"] for one in server.cli("status", "--json")["devices"] if one["name"] == "cpu:0")
            results, killed = uvloop.run(scenario(server, names, FEATHER, victim))
            status = server.cli("status", "--json")
    stood_s = {name: [max_gap(each, killed) for each in results if each.model == name] for name in names}
    return {
        "benchmark": "crash_ranks",
        "models": len(names),
        **figures([each for each in results if each.model == SPLIT], killed, FEATHER[1]),
        "streams": len(results),
        "running_when_killed": sum(1 for each in results if each.stamps and each.stamps[0] < killed < each.stamps[-1]),
        "failed": sum(not each.ok for each in results),
        "split_longest_s": round(max(stood_s[SPLIT]), 3),
        "whole_longest_s": round(max(max(stood_s[name]) for name in WHOLE), 3),
        "whole_longest_before_s": round(max(max_gap(each, 0.0, killed) for each in results if each.model in WHOLE), 3),
        "whole_stalls": sum(gap > STALL_S for name in WHOLE for gap in stood_s[name]),
        "engine_restarts": status["engine_restarts"],
    }


def max_gap(result: Result, begin: float, end: float = math.inf) -> float:
    """Returns the longest time without a token that ends between two moments."""
    gaps = [b - a for a, b in zip(result.stamps, result.stamps[1:], strict=False) if begin < b < end]
    return max(gaps, default=0.0)


def _copy_seconds(server: Server) -> float:
    """Spent copying between host memory and the device, so far."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith('hearth_swap_seconds_total{phase="copy"}'))


def _loads(server: Server) -> list[dict[str, Any]]:
    lines = server.text("events", "--json").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "loaded"]


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"one": one, "three": three, "adopted": adopted, "ranks": ranks}


def run(only: str = "") -> list[dict[str, Any]]:
    return [make_line() for name, make_line in PARTS.items() if only in ("", name)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(PARTS), default="")
    for line in run(parser.parse_args().only):
        print(json.dumps(line), flush=True)
