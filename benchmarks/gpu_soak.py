"""Greedy texts of two models while two others load for the first time beside them: captures, measurements of kernels and copies of
a load must leave no trace in what the device computes for others. Each text is asked for twice when nothing else runs, in a batch
of one row and in one of eight; then again and again until both are loaded and their steps captured. One JSON line each; exits 1 if
a text differed.

In bfloat16 another number of rows is another kernel with another rounding, so the same step has to have the same rows each time:

- the prompts of a batch come in one request, and the engine stands still (SIGSTOP) until the daemon has handed all of its sequences
  to it. Each is a message of its own, so that an engine with nothing else to do would begin with the first;
- a turn (TURN_MS) bounds no step. A shorter one cuts batches by what steps seem to cost at the moment, which a load changes;
- nothing is drafted, for what is worth drafting is decided by the same costs;
- first of all the engine gets the idle time to choose kernels and to capture all steps of the models that are compared.

`more_steps` says how many more steps ran than so many tokens take: 0 if no batch was ever cut.

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
from benchmarks.gpu_texts import Question, answers, compared
from benchmarks.server import Server

NODE = Node(dict.fromkeys("abcd", "1b"), 4, max_model_len=4096, budget_bytes=40 << 30, drafts=False)
STREAMING, LOADED = "ab", "cd"
BATCHES = (1, 8)  # rows
MOST_ROUNDS = 200
TURN_MS = 60_000  # models still run their steps by turns
HANDED_LIMIT_S = 10.0
PAUSE_S = 0.5  # between two rounds beside others: steps are captured while the engine has nothing else to do
CAPTURED, CAPTURED_LIMIT_S = "{}: steps of every size are captured", 40.0  # what an engine logs; some 30 graphs of each model


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_soak"} | figures), flush=True)


class Asker:
    def __init__(self, server: Server, num_tokens: int) -> None:
        self._server, self._standing, where = server, asyncio.Lock(), urlsplit(server.url)
        self._host, self._port, self._num_tokens = str(where.hostname), int(where.port or 80), num_tokens

    async def batches(self, name: str) -> dict[Question, str]:
        """Asks one model, batch after batch, each in one request."""
        texts: dict[Question, str] = {}
        for num_rows in BATCHES:
            asked = [Question(name, 100 * num_rows + row, self._num_tokens // num_rows) for row in range(num_rows)]
            texts |= zip(asked, await self._together(name, asked), strict=True)
        return texts

    async def _together(self, name: str, asked: Sequence[Question]) -> list[str]:
        """Returns the answers of a batch that the engine begins with all at once."""
        if len(asked) == 1:
            return await answers(self._host, self._port, asked)
        (engine,) = self._server.engines()
        async with self._standing:
            engine.suspend()
            try:
                answering = asyncio.create_task(answers(self._host, self._port, asked))
                async with asyncio.timeout(HANDED_LIMIT_S):
                    while await asyncio.to_thread(self._handed, name) < len(asked):
                        if answering.done():  # refused
                            break
            finally:
                engine.resume()
        return await answering

    def _handed(self, name: str) -> float:
        """Returns how many requests of a model the daemon has handed to the engine."""
        return self._server.metric(f'hearth_requests_active{{model="{name}"}}')

    @property
    def num_steps(self) -> int:
        """Returns how many steps the batches of one model take."""
        return sum(self._num_tokens // num_rows for num_rows in BATCHES)

    async def alone(self, names: Sequence[str]) -> dict[Question, str]:
        texts: dict[Question, str] = {}
        for name in names:
            texts |= await self.batches(name)
        return texts

    async def beside(self, names: Sequence[str], others: asyncio.Task[None]) -> list[dict[Question, str]]:
        """Asks all models at once until `others` is done, and once at least, with pauses."""
        rounds: list[dict[Question, str]] = []
        while not rounds or (not others.done() and len(rounds) < MOST_ROUNDS):
            texts = await asyncio.gather(*map(self.batches, names))
            rounds.append({asked: text for one in texts for asked, text in one.items()})
            await asyncio.wait([others], timeout=PAUSE_S)
        return rounds


async def load(server: Server, names: Sequence[str], captures: bool) -> None:
    """Loads models for the first time. captures: whether their steps are captured, which is waited for as well."""
    for name in names:
        began_s = time.perf_counter()
        await asyncio.to_thread(server.cli, "load", name, "--json")
        tell(what="first load", model=name, seconds=round(time.perf_counter() - began_s, 2))
    if captures:
        await captured(server, names)


async def captured(server: Server, names: Sequence[str], limit_s: float = CAPTURED_LIMIT_S) -> None:
    """Waits until an engine that has idle time has chosen the kernels of these models and captured their steps. Tells which of them
    were not ready in limit_s seconds."""
    began_s, lacking = time.perf_counter(), list(names)
    while True:
        log = server.log.read_text(errors="replace")
        lacking = [name for name in lacking if CAPTURED.format(name) not in log]
        seconds = time.perf_counter() - began_s
        if not lacking or seconds > limit_s:
            break
        await asyncio.sleep(0.1)
    tell(what="captured", models=list(names), seconds=round(seconds, 2), lacking=lacking)


def steps_of(server: Server, names: Sequence[str]) -> int:
    """Returns how many steps of these models have run."""
    return int(sum(server.metric(f'hearth_steps_total{{model="{name}"}}') for name in names))


async def soak(server: Server, num_tokens: int, captures: bool) -> bool:
    """Returns whether every text was the same."""
    asker = Asker(server, num_tokens)
    await load(server, STREAMING, captures)
    await asker.alone(STREAMING)  # fills prefix caches
    before = await asyncio.to_thread(steps_of, server, STREAMING)
    first, again = await asker.alone(STREAMING), await asker.alone(STREAMING)
    loads = asyncio.create_task(load(server, LOADED, captures))
    rounds = await asker.beside(STREAMING, loads)
    await loads
    steps = await asyncio.to_thread(steps_of, server, STREAMING) - before
    found = [compared(first, again, one) for one in rounds]
    total = {key: sum(one[key] for one in found) for key in ("compared", "no_answer", "differing")}
    tell(
        what="texts",
        rounds=len(rounds),
        unsteady=found[0]["unsteady"],
        **total,
        which=[one for each in found for one in each["which"]][:8],
        more_steps=steps - (2 + len(rounds)) * len(STREAMING) * asker.num_steps,
    )
    return total["compared"] > 0 and not total["differing"] and not total["no_answer"]


def run(folder: pathlib.Path, tiny: bool) -> None:
    began_s = time.perf_counter()
    gpu_checkpoints.make_apart(folder, dict.fromkeys(NODE.models, "tiny" if tiny else "1b"), "cpu" if tiny else "cuda")
    tell(what="made", models=len(NODE.models), seconds=round(time.perf_counter() - began_s, 1))
    devices, flags = [NODE.device], NODE.flags(folder)
    if tiny:
        devices, flags = ["cpu=64MiB"], [*TINY, *settings(folder, NODE.models, 256, NODE.drafts)]
    with Server(folder, devices, [*flags, "--max-wait-s", "90", "--turn-budget-ms", str(TURN_MS)]) as server:
        if not uvloop.run(soak(server, 64 if tiny else 400, captures=not tiny)):
            sys.exit(f"texts differed, or there were none\n{server.log_end()}")


if __name__ == "__main__":
    main("benchmarks.gpu_soak", __doc__, NODE, run)
