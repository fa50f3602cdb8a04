"""Inter-token latency where it is in danger: a long prompt beside running streams, and models that share a device.

`prompt`: 8 streams decode; prompts of 2,000 words arrive one after the other. Bar: their p99 while one is computed <= 3 x the
undisturbed p50; `quiet_after_p50_ms` is what the streams take when they are longer, `beside_p99_ms_by_third_of_the_prompt` tells
whether contexts are what makes steps long. `models`: three copies of a checkpoint, first each with a stream of its own, then two of
them with 32. Bar: the quiet one's p99 <= 1.3 x (its step alone + 2 turns); `own_beside_ms` is its mean step while the others run
(three models' weights may not fit a cache that one's do), `p99_over_bar_beside` the same with that. `daemon`: how long /healthz
takes while 8 streams decode and while nothing runs, and the CPU time of an idle node.
usage: python -m benchmarks.latency [--model mid] [--only prompt,models,daemon] [--threads N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import tempfile
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.checkpoints import make
from benchmarks.cohost import scraped
from benchmarks.load import Result, drive, percentile, stream_one, tree_cpu_s
from benchmarks.server import ROOT, Server

STORE = ROOT / ".cache" / "checkpoints"
STREAMS, FLOOD, PROMPTS, PROMPT_WORDS = 8, 32, 4, 2000
TURN_MS = 10.0
PAUSE_S = 0.3  # from one prompt to the next


def gaps_ms(results: list[Result], begin: float = 0.0, end: float = float("inf")) -> list[float]:
    """Returns the times between two reads of one stream that ended in [begin, end]."""
    return [
        1e3 * (b - a) for result in results for a, b in zip(result.stamps, result.stamps[1:], strict=False) if begin <= b <= end
    ]


def part(begin: float, end: float, third: int) -> tuple[float, float]:
    each = (end - begin) / 3
    return begin + third * each, begin + (third + 1) * each


async def beside_prompts(url: str, model: str, num_out: int) -> dict[str, Any]:
    where = urlsplit(url)
    streams = asyncio.ensure_future(drive(url, [model], STREAMS, STREAMS, 32, num_out, seed=1))
    await asyncio.sleep(1.0)
    quiet_begin = time.perf_counter()
    await asyncio.sleep(1.5)
    quiet_end = time.perf_counter()
    windows = []
    for number in range(PROMPTS):
        body = {"model": model, "prompt": " ".join([f"layer{number}", *["stream"] * PROMPT_WORDS]), "max_tokens": 1}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        result = await stream_one(str(where.hostname), int(where.port or 80), body)
        if not result.ok:
            raise RuntimeError(result.error or str(result.status))
        windows.append((result.started, result.stamps[0], result.prompt_tokens))
        await asyncio.sleep(PAUSE_S)
        quiet_late_end = time.perf_counter()
    still_running = not streams.done()
    results = await streams
    quiet = gaps_ms(results, quiet_begin, quiet_end)
    beside = [gap for begin, end, _ in windows for gap in gaps_ms(results, begin, end)]
    thirds = [
        percentile([gap for begin, end, _ in windows for gap in gaps_ms(results, *part(begin, end, third))], 0.99)
        for third in range(3)
    ]
    p50, p99 = percentile(quiet, 0.5), percentile(beside, 0.99)
    return {
        "streams": STREAMS,
        "prompt_tokens": windows[0][2],
        "quiet_p50_ms": round(p50, 2),
        "quiet_p99_ms": round(percentile(quiet, 0.99), 2),
        "quiet_after_p50_ms": round(percentile(gaps_ms(results, quiet_late_end - PAUSE_S / 2, quiet_late_end), 0.5), 2),
        "beside_p50_ms": round(percentile(beside, 0.5), 2),
        "beside_p90_ms": round(percentile(beside, 0.9), 2),
        "beside_p99_ms": round(p99, 2),
        "beside_max_ms": round(max(beside), 2),
        "beside_p99_ms_by_third_of_the_prompt": [round(each, 2) for each in thirds],
        "p99_over_quiet_p50": round(p99 / p50, 2),
        "first_token_ms": round(1e3 * percentile([end - begin for begin, end, _ in windows], 0.5)),
        "valid": still_running,
    }


async def first_token_ms(url: str, model: str) -> float:
    """Returns the time to the first token of such a prompt while nothing else runs."""
    (result,) = await drive(url, [model], 1, 1, PROMPT_WORDS, 1, seed=9)
    return 1e3 * (result.stamps[0] - result.started)


async def share(url: str, models: list[str], streams: list[int], num_out: int, seed: int) -> list[list[Result]]:
    """streams[i] closed loops of models[i]; all go on until the first model's are done."""
    floods = [
        asyncio.ensure_future(drive(url, [model], 100 * number, number, 32, num_out, seed=seed + at))
        for at, (model, number) in enumerate(zip(models[1:], streams[1:], strict=True))
        if number
    ]
    await asyncio.sleep(2.0)  # costs of steps are learned, queues have built up
    quiet = await drive(url, [models[0]], 4 * streams[0], streams[0], 32, num_out, seed=seed + 50)
    for flood in floods:
        flood.cancel()
    await asyncio.gather(*floods, return_exceptions=True)
    return [quiet]


def between_models(model: str, threads: list[str]) -> list[dict[str, Any]]:
    folder = make(STORE, model)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    lines = []
    with tempfile.TemporaryDirectory(prefix="models-", dir=STORE.parent) as root:
        names = [f"{model}-{letter}" for letter in "abc"]
        for name in names:
            (pathlib.Path(root) / name).mkdir()
            for file in folder.iterdir():
                os.link(file, pathlib.Path(root) / name / file.name)
        with Server(pathlib.Path(root), [f"cpu={4 * weights + (2 << 30)}"], threads) as server:
            for name in names:
                uvloop.run(drive(server.url, [name], 2, 2, 32, 8))
            alone = percentile(gaps_ms(uvloop.run(share(server.url, names, [1, 0, 0], 128, 1))[0]), 0.5)
            bar = 1.3 * (alone + 2 * TURN_MS)
            for title, streams in (("a stream each", [1, 1, 1]), ("two flooded", [1, FLOOD, FLOOD])):
                before, begin = scraped(server.url), time.perf_counter()
                (quiet,) = uvloop.run(share(server.url, names, streams, 128, 100 + streams[1]))
                time.sleep(0.5)  # counts are told now and then
                counted, gaps = scraped(server.url) - before, gaps_ms(quiet)
                of = f'{{model="{names[0]}"}}'
                beside = 1e3 * counted[f"hearth_step_seconds_total{of}"] / counted[f"hearth_steps_total{of}"]
                lines.append(
                    {
                        "benchmark": "latency",
                        "kind": "models",
                        "case": title,
                        "model": model,
                        "alone_p50_ms": round(alone, 2),
                        "p50_ms": round(percentile(gaps, 0.5), 2),
                        "p99_ms": round(percentile(gaps, 0.99), 2),
                        "bar_ms": round(bar, 2),
                        "p99_over_bar": round(percentile(gaps, 0.99) / bar, 2),
                        "own_beside_ms": round(beside, 2),
                        "p99_over_bar_beside": round(percentile(gaps, 0.99) / (1.3 * (beside + 2 * TURN_MS)), 2),
                        "failed": sum(not result.ok for result in quiet),
                        "wall_s": round(time.perf_counter() - begin, 1),
                    }
                )
    return lines


def health_ms(url: str, seconds: float) -> list[float]:
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        with urllib.request.urlopen(url + "/healthz", timeout=5) as response:
            response.read()
        taken.append(1e3 * (time.perf_counter() - begin))
        time.sleep(0.005)
    return taken


async def daemon_beside(server: Server, model: str) -> dict[str, Any]:
    idle = await asyncio.to_thread(health_ms, server.url, 1.0)
    before, start = tree_cpu_s(server.pid), time.perf_counter()
    await asyncio.sleep(3)
    share = (tree_cpu_s(server.pid) - before) / (time.perf_counter() - start)
    load = asyncio.ensure_future(drive(server.url, [model], STREAMS, STREAMS, 32, 300, seed=21))
    await asyncio.sleep(0.7)
    busy = await asyncio.to_thread(health_ms, server.url, 2.0)
    results = await load
    return {
        "idle_core_percent": round(100 * share, 2),
        "health_idle_p50_ms": round(percentile(idle, 0.5), 2),
        "health_busy_p50_ms": round(percentile(busy, 0.5), 2),
        "health_busy_p99_ms": round(percentile(busy, 0.99), 2),
        "itl_p50_ms": round(percentile(gaps_ms(results), 0.5), 2),
        "out_tok_s": round(
            sum(r.completion_tokens for r in results) / (max(r.stamps[-1] for r in results) - results[0].started), 1
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mid")
    parser.add_argument("--only", default="prompt,models,daemon")
    parser.add_argument("--threads", default="", help="of the engine; one or more, with commas")
    parser.add_argument("--stretch", default="", help="max_step_stretch; one or more, with commas")
    args = parser.parse_args()
    kinds = args.only.split(",")
    folder = make(STORE, args.model)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for threads in args.threads.split(","):
        flags = ["--threads", threads] if threads else []
        about = {"threads": int(threads)} if threads else {}
        if "prompt" in kinds or "daemon" in kinds:
            for stretch in args.stretch.split(","):
                more = ["--max-step-stretch", stretch] if stretch else []
                told = about | ({"max_step_stretch": float(stretch)} if stretch else {})
                with Server(STORE, [f"cpu={2 * weights + (2 << 30)}"], flags + more) as server:
                    uvloop.run(drive(server.url, [args.model], 8, 8, 128, 32))
                    if "daemon" in kinds:
                        line = uvloop.run(daemon_beside(server, args.model))
                        print(
                            json.dumps({"benchmark": "latency", "kind": "daemon", "model": args.model, **told, **line}), flush=True
                        )
                    if "prompt" in kinds:
                        line = uvloop.run(beside_prompts(server.url, args.model, 1200))
                        line["first_token_alone_ms"] = round(uvloop.run(first_token_ms(server.url, args.model)))
                        print(
                            json.dumps({"benchmark": "latency", "kind": "prompt", "model": args.model, **told, **line}), flush=True
                        )
        if "models" in kinds:
            for line in between_models(args.model, flags):
                print(json.dumps(line | about), flush=True)


if __name__ == "__main__":
    main()
