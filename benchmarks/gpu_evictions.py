"""Measures how a model's streams are delayed while another model moves: gaps between the tokens of a 1B model while an 8B model, a
thousand chunks of memory, is evicted to nothing or to host memory and comes back from there or from its files, which are in the
page cache. One JSON line each.

usage: python -m benchmarks.gpu_evictions [--tiny]: --tiny with small models, computed on the cpu device.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks import gpu_checkpoints
from benchmarks.gpu_node import TINY, Node, host_tier, last_source, main, settings
from benchmarks.gpu_texts import Question, prompt_of
from benchmarks.load import Result, percentile, stream_one
from benchmarks.loading import set_cache
from benchmarks.server import Server

NODE = Node({"small": "1b", "big": "8b"}, 2, max_model_len=4096, budget_bytes=40 << 30, host_tier_bytes=20 << 30)
QUIET_S, AFTER_S = 2.0, 0.1
# What is done, as the line says it, and where the weights must come from. In turn, so that each finds what the one before left.
MOVES = (
    ("load from files", ("load", "big", "--json"), "disk"),
    ("evict to host", ("unload", "big", "--to", "warm", "--json"), ""),
    ("load from host", ("load", "big", "--json"), "host"),
    ("evict", ("unload", "big", "--json"), ""),
)
Window = tuple[str, float, float]


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_evictions"} | figures), flush=True)


def gaps_in(results: Sequence[Result], windows: Sequence[Window], kind: str) -> list[float]:
    """Returns the seconds between two tokens of a stream, of those that overlap a window of this kind."""
    spans = [(begin_s, end_s) for what, begin_s, end_s in windows if what == kind]
    pairs = [pair for result in results for pair in zip(result.stamps, result.stamps[1:], strict=False)]
    return [after - before for before, after in pairs if any(before < end_s and after > begin_s for begin_s, end_s in spans)]


async def stream(server: Server, num_tokens: int, results: list[Result], stop: asyncio.Event) -> None:
    where = urlsplit(server.url)
    body: dict[str, object] = {"model": "small", "prompt": prompt_of(Question("small", 1, 0)), "max_tokens": num_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    while not stop.is_set():
        await stream_one(str(where.hostname), int(where.port or 80), body, followed=results)


async def move(server: Server, rounds: int, num_tokens: int) -> bool:
    """Returns whether all weights came from where they should and no stream failed."""
    results, windows, wrong = list[Result](), list[Window](), list[str]()
    stop = asyncio.Event()
    await asyncio.to_thread(server.cli, "load", "small", "--json")
    await asyncio.to_thread(server.cli, "load", "big", "--json")  # compiles, and captures graphs
    await asyncio.to_thread(server.cli, "unload", "big", "--json")
    streaming = asyncio.create_task(stream(server, num_tokens, results, stop))
    await asyncio.sleep(QUIET_S)
    began_s = time.perf_counter()
    await asyncio.sleep(QUIET_S)
    windows.append(("nothing", began_s, time.perf_counter()))
    for _ in range(rounds):
        for what, command, source in MOVES:
            began_s = time.perf_counter()
            await asyncio.to_thread(server.cli, *command)
            windows.append((what, began_s, time.perf_counter() + AFTER_S))
            found = await asyncio.to_thread(last_source, server, "big") if source else ""
            if found != source:
                wrong.append(f"{what}: its weights came from {found}")
            await asyncio.sleep(3 * AFTER_S)
    stop.set()
    await streaming
    for kind in ("nothing", *(what for what, _, _ in MOVES)):
        spans = sorted(end_s - begin_s for what, begin_s, end_s in windows if what == kind)
        ms = [1e3 * gap for gap in gaps_in(results, windows, kind)]
        figures = {"p50_ms": percentile(ms, 0.5), "p99_ms": percentile(ms, 0.99), "longest_gap_ms": max(ms, default=0.0)}
        rounded = {key: round(value, 2) for key, value in figures.items()}
        tell(what="gaps", beside=kind, times=len(spans), seconds=round(spans[len(spans) // 2], 2), gaps=len(ms), **rounded)
    failed = [result.error or str(result.status) for result in results if not result.ok]
    tell(what="sources", wrong=wrong, streams=len(results), failed=len(failed), errors=failed[:3])
    return not wrong and not failed


def run(folder: pathlib.Path, tiny: bool) -> None:
    shapes = dict.fromkeys(NODE.models, "tiny") if tiny else NODE.models
    gpu_checkpoints.make_apart(folder, shapes, "cpu" if tiny else "cuda")
    try:
        set_cache(list((folder / "big").glob("*.safetensors")), warm=True)  # a part before may have dropped them
    except SystemExit as error:
        tell(what="page cache", why=str(error))
    devices, flags = [NODE.device], NODE.flags(folder)
    if tiny:
        devices, flags = ["cpu=64MiB"], [*TINY, *host_tier(64 << 20), *settings(folder, NODE.models, 256)]
    with Server(folder, devices, flags) as server:
        if not uvloop.run(move(server, 1 if tiny else 3, 200 if tiny else 3000)):
            sys.exit(f"weights came from elsewhere, or a stream failed\n{server.log_end()}")


if __name__ == "__main__":
    main("benchmarks.gpu_evictions", __doc__, NODE, run)
