"""kill -9 of the engine under 50 streams: how many requests fail or hang (should be none), and when tokens flow again.

usage: python -m benchmarks.crash
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import uvloop

from benchmarks.checkpoints import make
from benchmarks.load import Result, drive
from benchmarks.serve import STORE
from benchmarks.server import Server


async def kill_midway(server: Server, delay_s: float) -> float:
    await asyncio.sleep(delay_s)
    (engine,) = server.engines()
    os.kill(engine.pid, signal.SIGKILL)
    return time.perf_counter()


async def scenario(server: Server) -> tuple[list[Result], float]:
    work = asyncio.wait_for(drive(server.url, ["feather"], 50, 50, 128, 400), 120)
    results, killed = await asyncio.gather(work, kill_midway(server, 1.0))
    return results, killed


def run() -> list[dict[str, Any]]:
    feather = make(STORE, "feather")
    with Server(feather.parent, ["cpu=2GiB"], ["--dtype", "float32"]) as server:
        server.cli("load", "feather")
        uvloop.run(drive(server.url, ["feather"], 4, 4, 16, 8))
        results, killed = uvloop.run(scenario(server))
        status = server.cli("status", "--json")
    after = sorted(stamp for r in results for stamp in r.stamps if stamp > killed + 0.05)
    running = sum(1 for r in results if r.stamps and r.stamps[0] < killed < r.stamps[-1])
    # the first token after the longest silence is the first one of the new engine
    gaps = [(b - a, b) for a, b in zip([killed, *after], after, strict=False)]
    return [
        {
            "benchmark": "crash",
            "streams": len(results),
            "running_when_killed": running,
            "failed": sum(not r.ok for r in results),
            "errors": sorted({r.error[:120] for r in results if r.error}),
            "tokens_missing": sum(400 - r.completion_tokens for r in results),
            "serving_again_s": round(max(gaps)[1] - killed, 2),
            "engine_restarts": status["engine_restarts"],
        }
    ]


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line), flush=True)
