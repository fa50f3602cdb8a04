"""Measures what a second replica of a model gives: on a node of two one-core devices, the same load with `replicas` 1 and 2 in
turn.

rate: tokens a second at 32 streams. kill: kill -9 of one engine under 50 streams; the longest time without a token of each stream,
also of those at the other replica. conversations: 24 at a time, four turns each, every turn with all of the turns before it; the
share of their prompts that the replica had cached, beside the share that any cache could have.
`python -m benchmarks.replicas [--only rate,kill,conversations]` prints one JSON line and a table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import sys
import tempfile
import time
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.checkpoints import make
from benchmarks.crash import FEATHER, scenario
from benchmarks.load import WORDS, Result, completion, drive, stream_one
from benchmarks.run import table
from benchmarks.serve import STORE
from benchmarks.server import Server
from engine.host.processor import this_processor

DEVICES = ["cpu:0=1GiB", "cpu:1=1GiB"]
PARTS = ("rate", "kill", "conversations")
CONVERSATIONS, TURNS, WORDS_A_TURN, TOKENS_A_TURN = 24, 4, 120, 24


class Node:
    """`with Node("mid", 2) as server:`, with as many replicas ready."""

    def __init__(self, model: str, replicas: int) -> None:
        self._model, self._replicas = model, replicas

    def __enter__(self) -> Server:
        self._place = tempfile.TemporaryDirectory(prefix="hearth-replicas-")
        config = pathlib.Path(self._place.name) / "node.toml"
        config.write_text(f'[models."{self._model}"]\nspeculator = "none"\nreplicas = {self._replicas}\n')
        folder = make(STORE, self._model).parent
        self._server = Server(folder, DEVICES, ["--config", str(config), "--threads", "1", "--dtype", "float32"])
        server = self._server.__enter__()
        uvloop.run(drive(server.url, [self._model], 8, 8, 16, 8))
        end_s = time.monotonic() + 60
        while sum(row["state"] == "ready" for row in self.rows(server)) < self._replicas:
            if time.monotonic() > end_s:
                raise RuntimeError(f"only {self.rows(server)} after 60 s")
            uvloop.run(drive(server.url, [self._model], 1, 1, 16, 8))
        return server

    def rows(self, server: Server) -> list[dict[str, Any]]:
        """Returns the rows of the model's replicas."""
        return [row for row in server.cli("models", "--json") if self._model in (row["name"], row.get("replica_of"))]

    def __exit__(self, *_: object) -> None:
        self._server.__exit__(None, None, None)
        self._place.cleanup()


def rate(replicas: int) -> dict[str, Any]:
    with Node("mid", replicas) as server:
        begin_s = time.perf_counter()
        results = uvloop.run(drive(server.url, ["mid"], 64, 32, 64, 96))
        wall_s = time.perf_counter() - begin_s
    return {"tok_per_s": round(sum(each.completion_tokens for each in results) / wall_s, 1), "failed": _failed(results)}


def kill(replicas: int) -> dict[str, Any]:
    node = Node("feather", replicas)
    with node as server:
        device = next(row["device"] for row in node.rows(server) if row["name"] == "feather")
        victim = next(one["pid"] for one in server.cli("status", "--json")["devices"] if one["name"] == device)
        results, _ = uvloop.run(scenario(server, ["feather"], FEATHER, victim))
    gaps = sorted(max(b - a for a, b in zip(each.stamps, each.stamps[1:], strict=False)) for each in results if each.ok)
    return {"failed": _failed(results), "longest_gap_s": round(gaps[-1], 2), "median_longest_gap_s": round(gaps[len(gaps) // 2], 3)}


def conversations(replicas: int) -> dict[str, Any]:
    async def one(server: Server, number: int, found: list[Result]) -> None:
        where = urlsplit(server.url)
        rng, text = random.Random(number), ""
        for _ in range(TURNS):
            text += " ".join(rng.choice(WORDS) for _ in range(WORDS_A_TURN)) + " "
            body = completion("feather", text, TOKENS_A_TURN)
            result = await stream_one(str(where.hostname), int(where.port or 80), body)
            found.append(result)

    async def all_of_them(server: Server) -> list[list[Result]]:
        found: list[list[Result]] = [[] for _ in range(CONVERSATIONS)]
        await asyncio.gather(*(one(server, number, each) for number, each in enumerate(found)))
        return found

    with Node("feather", replicas) as server:
        found = uvloop.run(all_of_them(server))
    prompts = sum(each.prompt_tokens for turns in found for each in turns)
    seen = sum(before.prompt_tokens for turns in found for before in turns[:-1])  # what a turn has in common with the one before it
    cached = sum(each.usage["prompt_tokens_details"]["cached_tokens"] for turns in found for each in turns)
    failed = sum(_failed(turns) for turns in found)
    return {"failed": failed, "cached_share": round(cached / prompts, 3), "could_be_cached": round(seen / prompts, 3)}


def _failed(results: list[Result]) -> int:
    return sum(not each.ok for each in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    only = parser.parse_args().only.split(",")
    line: dict[str, Any] = {"benchmark": "replicas", "processor": this_processor().tier.name}
    for part in (each for each in PARTS if each in only):
        for replicas in (1, 2):
            line[f"{part}_{replicas}"] = {"rate": rate, "kill": kill, "conversations": conversations}[part](replicas)
            print(part, replicas, line[f"{part}_{replicas}"], file=sys.stderr, flush=True)
    print(json.dumps(line))
    rows = [
        {"part": part, "figure": key, "one": line[f"{part}_1"][key], "two": line[f"{part}_2"][key]}
        for part in PARTS
        if part in only
        for key in line[f"{part}_1"]
    ]
    print(table(rows, {"part": "part", "figure": "figure", "one": "one replica", "two": "two"}))


if __name__ == "__main__":
    main()
