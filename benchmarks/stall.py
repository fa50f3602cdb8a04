"""The longest hold of the event loop while 50 streams run and the two worst requests arrive: a 1 MB prompt, and the first
request for a model whose tokenizer has 128,000 entries.

Two independent views: the daemon's own loop watch, and the longest gap any of the 50 clients saw between two reads.
usage: python -m benchmarks.stall
"""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any

import aiohttp
import uvloop

from benchmarks.checkpoints import make, make_large_tokenizer
from benchmarks.load import drive
from benchmarks.serve import STORE
from benchmarks.server import Server


async def disturb(server: Server, delay_s: float) -> list[int]:
    """The two requests, one after the other; their statuses (the prompt is longer than the model allows: a clean 400)."""
    await asyncio.sleep(delay_s)
    statuses = []
    text = "weights stream from the drive " * (1_000_000 // 30)
    async with aiohttp.ClientSession() as session:
        for model, prompt in (("feather", text), ("large-vocabulary", "one two three")):
            body = {"model": model, "prompt": prompt, "max_tokens": 4}
            async with session.post(server.url + "/v1/completions", json=body) as response:
                await response.read()
                statuses.append(response.status)
            await asyncio.sleep(0.5)
    return statuses


async def streams_with(server: Server, disturbed: bool) -> tuple[float, list[int]]:
    """Longest gap in ms between two reads of any of 50 streams, and the disturbing requests' statuses."""
    work = drive(server.url, ["feather"], 50, 50, 64, 400)
    other = disturb(server, 1.5) if disturbed else asyncio.sleep(0, [])
    results, statuses = await asyncio.gather(work, other)
    gaps = [b - a for r in results for a, b in zip(r.stamps, r.stamps[1:], strict=False)]
    return 1e3 * max(gaps), statuses


def run() -> list[dict[str, Any]]:
    folder = STORE.parent / "stall"
    shutil.rmtree(folder, ignore_errors=True)
    source = make(STORE, "feather")
    shutil.copytree(source, folder / "feather")
    make_large_tokenizer(folder / "large-vocabulary", source)
    with Server(folder, ["cpu=2GiB"], ["--runner", "null", "--null-step-ms", "10", "--loop-watch-ms", "0.5"]) as server:
        server.cli("load", "feather")
        uvloop.run(drive(server.url, ["feather"], 4, 4, 16, 8))
        quiet_gap, _ = uvloop.run(streams_with(server, disturbed=False))
        before = server.cli("status", "--json")["event_loop_stall_max_s"]
        gap, statuses = uvloop.run(streams_with(server, disturbed=True))
        after = server.cli("status", "--json")["event_loop_stall_max_s"]
    return [
        {
            "benchmark": "stall",
            "streams": 50,
            "stall_max_ms_undisturbed": round(1e3 * before, 2),
            "stall_max_ms": round(1e3 * after, 2),
            "client_gap_max_ms_undisturbed": round(quiet_gap, 1),
            "client_gap_max_ms": round(gap, 1),
            "statuses": statuses,
        }
    ]


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line), flush=True)
