"""Measures what keys, a log line per request and metrics that are scraped every second cost: CPU per output token of the whole
process tree.

Two servers of this version run side by side and take turns under the same load: `plain` (no keys, warnings only, nobody reads the
metrics) and `full` (keys of several tenants, a line per request into a file, /metrics read once a second). What is compared are the
medians of the turns; `ratio_each` are the ratios of neighbours, which show how steady the machine was.
usage: python -m benchmarks.overhead [--streams 64,200] [--only null|feather] [--turns 4]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import pathlib
import statistics
import tempfile
from typing import Any

import uvloop

from benchmarks.checkpoints import make
from benchmarks.load import measure
from benchmarks.serve import STORE
from benchmarks.server import Server
from daemon.access.keys import hash_key, new_key

NUM_TENANTS = 8
SCRAPE_EVERY_S = 1.0


def keys_file(folder: pathlib.Path, keys: list[str]) -> pathlib.Path:
    """One tenant a key; the first one may read the metrics."""
    tables = [
        f'[tenants.t{at}]\nkeys = ["{hash_key(key)}"]\nweight = {at + 1}.0\nadmin = {str(at == 0).lower()}\n'
        for at, key in enumerate(keys)
    ]
    path = folder / "keys.toml"
    path.write_text("\n".join(tables))
    return path


async def scrape(host: str, port: int, key: str, sizes: list[int]) -> None:
    """GET /metrics every second on one connection, as Prometheus does, for ever; sizes: bytes of each answer."""
    reader, writer = await asyncio.open_connection(host, port)
    request = f"GET /metrics HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    try:
        while True:
            await asyncio.sleep(SCRAPE_EVERY_S / 2)
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if not head.startswith("HTTP/1.1 200"):
                raise RuntimeError(f"/metrics: {head.splitlines()[0]}")
            length = int(next(line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length:")))
            sizes.append(len(await reader.readexactly(length)))
            await asyncio.sleep(SCRAPE_EVERY_S / 2)
    finally:
        writer.close()


async def turn(server: Server, num: int, streams: int, keys: list[str]) -> tuple[dict[str, Any], int]:
    """One measured load, and how often /metrics was read meanwhile. keys: empty for `plain`."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    sizes: list[int] = []
    reading = asyncio.ensure_future(scrape(host, int(port), keys[0], sizes)) if keys else None
    line = await measure(server.url, ["feather"], server.pid, num, streams, 128, 128, keys or ("",))
    if reading is not None:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading  # raises what went wrong with it
    return line, len(sizes)


def run(kind: str, streams: list[int], num_turns: int) -> list[dict[str, Any]]:
    feather = make(STORE, "feather")
    flags = ["--runner", "null", "--null-step-ms", "10"] if kind == "null" else []
    keys = [new_key() for _ in range(NUM_TENANTS)]
    lines: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-bench-")))
        plain = stack.enter_context(Server(feather.parent, ["cpu=1GiB"], [*flags, "--log-level", "warning"]))
        full = stack.enter_context(Server(feather.parent, ["cpu=1GiB"], [*flags, "--keys-file", str(keys_file(folder, keys))]))
        sides = {"plain": (plain, []), "full": (full, keys)}
        for server, its_keys in sides.values():
            server.cli("load", "feather")
            uvloop.run(turn(server, 64, 32, its_keys))  # parses the tokenizer, touches memory
        for count in streams:
            # a turn takes a few seconds, so that the reads of /metrics have their true share
            num = count * (4 if kind == "null" else max(2, 1000 // count))
            cost: dict[str, list[float]] = {"plain": [], "full": []}
            scrapes = failed = 0
            for number in range(num_turns):
                for name in ("plain", "full") if number % 2 else ("full", "plain"):
                    server, its_keys = sides[name]
                    line, reads = uvloop.run(turn(server, num, count, its_keys))
                    cost[name].append(float(line["cpu_us_per_out_token"]))
                    failed += int(line["failed"])
                    scrapes += reads
            medians = {name: statistics.median(values) for name, values in cost.items()}
            lines.append(
                {
                    "benchmark": "overhead",
                    "kind": kind,
                    "streams": count,
                    "plain_cpu_us_per_out_token": round(medians["plain"], 2),
                    "full_cpu_us_per_out_token": round(medians["full"], 2),
                    "ratio": round(medians["full"] / medians["plain"], 3),
                    "ratio_each": [round(b / a, 3) for a, b in zip(cost["plain"], cost["full"], strict=True)],
                    "requests_a_turn": num,
                    "metrics_reads": scrapes,
                    "failed": failed,
                }
            )
        lines[-1]["log_lines"] = full.log.read_text().count("request: ")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="64,200")
    parser.add_argument("--only", choices=["null", "feather"])
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    for kind in [args.only] if args.only else ["null", "feather"]:
        for line in run(kind, [int(s) for s in args.streams.split(",")], args.turns):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
