"""Drives an OpenAI-compatible server with streamed completions and measures what clients feel and what the host pays.

The client counts SSE events in raw bytes and parses only each stream's last event: on a machine it shares with the server, a
client that costs as much as the server would measure itself. CPU is user + system time of the server's whole process tree.
usage: python -m benchmarks.load --url http://127.0.0.1:8000 --model NAME --pid PID [-n 64 -c 16 --input 128 --output 128 --key KEY]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

WORDS = ["stream", "token", "layer", "block", "weight", "cache", "page", "model", "queue", "step", "batch", "device", "memory"]


def cpu_s_by_name(pid: int) -> dict[str, float]:
    """User + system seconds of a process and all below it by their names, to the microsecond: psutil's are counted in ticks of
    10 ms."""
    seconds: dict[str, float] = {}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(OSError, psutil.Error):  # it has ended
            name = process.name()
            seconds[name] = seconds.get(name, 0.0) + time.clock_gettime(~process.pid << 3 | 2)  # clock_getcpuclockid(3)
    return seconds


def tree_cpu_s(pid: int) -> float:
    """Returns the seconds of all of them."""
    return sum(cpu_s_by_name(pid).values())


def tree_rss_bytes(pid: int) -> int:
    root = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


@dataclass(slots=True)
class Result:
    """One request. model: as the request named it. stamps: arrival of each read that held events, seconds; events: SSE data events
    but [DONE]."""

    started: float
    stamps: list[float] = field(default_factory=list)
    events: int = 0
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    text: str = ""  # the answer's whole body, where it was to be kept
    usage: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    model: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error and self.completion_tokens > 0


async def stream_one(
    host: str, port: int, body: dict[str, object], keep_text: bool = False, key: str = "", followed: list[Result] | None = None
) -> Result:
    """One streamed completion on a connection of its own. key: "" for a server without keys. followed: gets the result at once, to
    be watched as it grows; `ended` says when it grows no more."""
    payload = json.dumps(body).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"{authorization}Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
    ).encode()
    result = Result(time.perf_counter(), model=str(body.get("model", "")))
    if followed is not None:
        followed.append(result)
    tail = b""
    whole = bytearray()
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        writer.write(head + payload)
        status_line = await reader.readline()
        result.status = int(status_line.split()[1])
        while True:
            data = await reader.read(1 << 18)
            if not data:
                break
            events = data.count(b"data: {")
            if events:
                result.events += events
                result.stamps.append(time.perf_counter())
            tail = (tail + data)[-4096:]
            if keep_text:
                whole += data
        writer.close()
    except OSError as error:
        result.error, result.ended = f"{type(error).__name__}: {error}", True
        return result
    if b"data: [DONE]" not in tail:
        result.error = tail[-300:].decode(errors="replace") or "closed before [DONE]"
    last = tail.rfind(b"data: {")
    if last >= 0:
        usage = result.usage = json.loads(tail[last + 6 : tail.index(b"\n", last)]).get("usage") or {}
        result.prompt_tokens, result.completion_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    if keep_text:
        result.text = bytes(whole).decode(errors="replace")
    result.ended = True
    return result


def completion(model: str, prompt: str, num_out: int) -> dict[str, object]:
    """Returns the body of a greedy streamed completion of exactly so many tokens, which tells its usage."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_out,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def drive(
    url: str,
    models: list[str],
    num: int,
    streams: int,
    num_in: int,
    num_out: int,
    seed: int = 0,
    keys: Sequence[str] = ("",),
    followed: list[Result] | None = None,
) -> list[Result]:
    """`num` requests of one length: see drive_lengths."""
    return await drive_lengths(url, models, [(num_in, num_out)] * num, streams, seed, keys, followed)


async def drive_lengths(
    url: str,
    models: Sequence[str],
    lengths: Sequence[tuple[int, int]],
    streams: int,
    seed: int = 0,
    keys: Sequence[str] = ("",),
    followed: list[Result] | None = None,
) -> list[Result]:
    """One request for each (words in, tokens out) over `streams` workers, the models in turn; prompts are random words, distinct,
    so that prefix caches do not help. keys: the requests take turns with them. followed: see stream_one."""
    where = urlsplit(url)
    rng = random.Random(seed)
    bodies = [
        completion(models[number % len(models)], " ".join(rng.choice(WORDS) for _ in range(num_in)), num_out)
        for number, (num_in, num_out) in enumerate(lengths)
    ]
    results: list[Result] = []

    async def worker() -> None:
        while bodies:
            key = keys[len(bodies) % len(keys)]
            results.append(await stream_one(str(where.hostname), int(where.port or 80), bodies.pop(), key=key, followed=followed))

    await asyncio.gather(*[worker() for _ in range(streams)])
    return results


def summary(results: list[Result], wall_s: float, cpu_s: float, rss_bytes: int) -> dict[str, object]:
    good = [r for r in results if r.ok]
    tokens = sum(r.completion_tokens for r in good)
    first = [1e3 * (r.stamps[0] - r.started) for r in good if r.stamps]
    gaps = [1e3 * (b - a) for r in good for a, b in zip(r.stamps, r.stamps[1:], strict=False)]
    # the usage event carries no token
    events = sum(r.events for r in good) - len(good)
    return {
        "requests": len(results),
        "failed": len(results) - len(good),
        "errors": sorted({r.error[:120] or str(r.status) for r in results if not r.ok})[:5],
        "wall_s": round(wall_s, 2),
        "input_tokens": sum(r.prompt_tokens for r in good),
        "output_tokens": tokens,
        "events_per_token": round(events / max(tokens, 1), 4),
        "out_tok_s": round(tokens / wall_s, 1),
        "ttft_p50_ms": round(percentile(first, 0.5), 1),
        "ttft_p99_ms": round(percentile(first, 0.99), 1),
        "itl_p50_ms": round(percentile(gaps, 0.5), 2),
        "itl_p99_ms": round(percentile(gaps, 0.99), 2),
        "cpu_us_per_out_token": round(1e6 * cpu_s / max(tokens, 1), 1),
        "rss_mb": round(rss_bytes / 1e6),
    }


async def measure(
    url: str, models: list[str], pid: int, num: int, streams: int, num_in: int, num_out: int, keys: Sequence[str] = ("",)
) -> dict[str, object]:
    cpu, start = tree_cpu_s(pid), time.perf_counter()
    results = await drive(url, models, num, streams, num_in, num_out, keys=keys)
    wall = time.perf_counter() - start
    return summary(results, wall, tree_cpu_s(pid) - cpu, tree_rss_bytes(pid))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, help="one name, or several with commas")
    parser.add_argument("--pid", type=int, required=True, help="the server's process; its children count too")
    parser.add_argument("-n", type=int, default=64, help="requests")
    parser.add_argument("-c", type=int, default=16, help="streams at a time")
    parser.add_argument("--input", type=int, default=128, help="words a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens a request")
    parser.add_argument("--key", default="", help="one API key, or several with commas: the requests take turns with them")
    args = parser.parse_args()
    measured = measure(args.url, args.model.split(","), args.pid, args.n, args.c, args.input, args.output, args.key.split(","))
    print(json.dumps(uvloop.run(measured)))


if __name__ == "__main__":
    main()
