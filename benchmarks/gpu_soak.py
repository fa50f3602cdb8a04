"""Greedy texts of two models while two others load for the first time beside them: captures, measurements of kernels and copies of
a load must leave no trace in what the device computes for others. Each text is asked for twice when nothing else runs, in a batch
of one row and in one of eight; then again and again until both loads are done. One JSON line each; exits 1 if a text differed.

usage: python -m benchmarks.gpu_soak [--tiny]: --tiny with small models, computed on the cpu device.
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
from benchmarks.gpu_node import TINY, Node, main, settings
from benchmarks.gpu_texts import Question, answer, compared
from benchmarks.server import Server

NODE = Node(dict.fromkeys("abcd", "1b"), 4, max_model_len=4096, budget_bytes=40 << 30)
STREAMING, LOADED = "ab", "cd"
BATCHES = (1, 8)  # rows
MOST_ROUNDS = 200


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_soak"} | figures), flush=True)


class Asker:
    def __init__(self, server: Server, num_tokens: int) -> None:
        where = urlsplit(server.url)
        self._host, self._port, self._num_tokens = str(where.hostname), int(where.port or 80), num_tokens

    async def batches(self, name: str) -> dict[Question, str]:
        """Asks one model, batch after batch."""
        texts: dict[Question, str] = {}
        for num_rows in BATCHES:
            asked = [Question(name, 100 * num_rows + row, self._num_tokens // num_rows) for row in range(num_rows)]
            texts |= zip(asked, await asyncio.gather(*(answer(self._host, self._port, one) for one in asked)), strict=True)
        return texts

    async def alone(self, names: Sequence[str]) -> dict[Question, str]:
        texts: dict[Question, str] = {}
        for name in names:
            texts |= await self.batches(name)
        return texts

    async def beside(self, names: Sequence[str], others: asyncio.Task[None]) -> list[dict[Question, str]]:
        """Asks all models at once until `others` is done, and once at least."""
        rounds: list[dict[Question, str]] = []
        while not rounds or (not others.done() and len(rounds) < MOST_ROUNDS):
            texts = await asyncio.gather(*map(self.batches, names))
            rounds.append({asked: text for one in texts for asked, text in one.items()})
        return rounds


async def load(server: Server, names: Sequence[str]) -> None:
    for name in names:
        began_s = time.perf_counter()
        await asyncio.to_thread(server.cli, "load", name, "--json")
        tell(what="first load", model=name, seconds=round(time.perf_counter() - began_s, 2))


async def soak(server: Server, num_tokens: int) -> bool:
    """Returns whether every text was the same."""
    asker = Asker(server, num_tokens)
    await load(server, STREAMING)
    await asker.alone(STREAMING)  # fills prefix caches and captures graphs
    first, again = await asker.alone(STREAMING), await asker.alone(STREAMING)
    loads = asyncio.create_task(load(server, LOADED))
    rounds = await asker.beside(STREAMING, loads)
    await loads
    found = [compared(first, again, one) for one in rounds]
    total = {key: sum(one[key] for one in found) for key in ("compared", "no_answer", "differing")}
    tell(
        what="texts",
        rounds=len(rounds),
        unsteady=found[0]["unsteady"],
        **total,
        which=[one for each in found for one in each["which"]][:8],
    )
    return total["compared"] > 0 and not total["differing"] and not total["no_answer"]


def run(folder: pathlib.Path, tiny: bool) -> None:
    began_s = time.perf_counter()
    gpu_checkpoints.make_apart(folder, dict.fromkeys(NODE.models, "tiny" if tiny else "1b"), "cpu" if tiny else "cuda")
    tell(what="made", models=len(NODE.models), seconds=round(time.perf_counter() - began_s, 1))
    devices, flags = [NODE.device], NODE.flags(folder)
    if tiny:
        devices, flags = ["cpu=64MiB"], [*TINY, *settings(folder, NODE.models, 256)]
    with Server(folder, devices, [*flags, "--max-wait-s", "90"]) as server:
        if not uvloop.run(soak(server, 64 if tiny else 400)):
            sys.exit(f"texts differed, or there were none\n{server.log_end()}")


if __name__ == "__main__":
    main("benchmarks.gpu_soak", __doc__, NODE, run)
