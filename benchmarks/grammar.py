"""Answers that must follow a JSON schema: what a mask costs, and whether what comes out is valid.

Masks: a random walk through 200 schemas on feather's vocabulary of 32,000; what each token costs (taking it in and the mask after
it) in the grammar process, and there and back as the engine sees it. Schemas: 500 of everyday difficulty (benchmarks/schemas.py)
asked of a served feather, whose weights are random; what ends is given to two validators. `length`: no end within max_tokens.
usage: python -m benchmarks.grammar
"""

from __future__ import annotations

import asyncio
import collections
import json
import mmap
import random
import sys
import time
from ctypes import addressof, c_char
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import jsonschema_rs
import numpy as np

from benchmarks.checkpoints import make
from benchmarks.schemas import Schema, schema
from benchmarks.serve import STORE
from benchmarks.server import Server
from engine.grammar.matchers import GrammarError, Matchers
from engine.grammar.messages import Advance, Open, Opened, Ready, Start, row_bytes
from engine.serve.grammar_port import GrammarPort

VOCAB_SIZE, END_ID = 32000, 1
NUM_SCHEMAS = 500
MAX_TOKENS = 1500
AT_ONCE = 24


def is_valid(made: Schema, text: str) -> bool:
    """Returns whether two validators that share no code accept the value; formats count."""
    value = json.loads(text)
    kind = jsonschema.Draft202012Validator
    first = kind(made, format_checker=kind.FORMAT_CHECKER).is_valid(value)
    second = jsonschema_rs.Draft202012Validator(made, validate_formats=True).is_valid(value)
    return bool(first and second)


def drawn(rng: random.Random, mask: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    return int(rng.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little"))))


def mask_costs(folder: Path, num_schemas: int = 200) -> dict[str, float]:
    memory = mmap.mmap(-1, row_bytes(VOCAB_SIZE))
    mask = np.frombuffer(memory, np.uint8)
    matchers = Matchers(str(folder), VOCAB_SIZE, [END_ID], memoryview(memory), addressof(c_char.from_buffer(memory)))
    costs_s: list[float] = []
    starts_s: list[float] = []
    for seed in range(num_schemas):
        rng = random.Random(seed)
        begin = time.perf_counter()
        try:
            matcher, ended = matchers.start(0, "json_schema:" + json.dumps(schema(seed)), [])
        except GrammarError:
            continue
        starts_s.append(time.perf_counter() - begin)
        matchers.add(seed, matcher)
        for _ in range(400):
            if ended:
                break
            token = drawn(rng, mask)
            begin = time.perf_counter()
            ended = bool(matchers.advance(seed, [token]))
            costs_s.append(time.perf_counter() - begin)
        matchers.forget(seed)
    costs_us = np.array(costs_s) * 1e6
    return {
        "masks": len(costs_us),
        "mask_us_p50": round(float(np.median(costs_us)), 1),
        "mask_us_p99": round(float(np.quantile(costs_us, 0.99)), 1),
        "mask_us_mean": round(float(costs_us.mean()), 1),
        "start_ms_p50": round(1e3 * float(np.median(starts_s)), 2),
    }


def _answers(port: GrammarPort) -> list[object]:
    return port.receive() if port.wait(60.0) else []


def round_trips(folder: Path, num_tokens: int = 2000) -> dict[str, float]:
    """Through the process, one row at a time."""
    port = GrammarPort(VOCAB_SIZE, 1)
    try:
        begin = time.perf_counter()
        port.send(Open(str(folder), VOCAB_SIZE, [END_ID], 1, 1))
        assert _answers(port) == [Opened("")]
        opened_s = time.perf_counter() - begin
        rng = random.Random(1)
        port.send(Start(1, 0, "regex:([a-z]+ [0-9]{1,6},)+", []))
        assert _answers(port) == [Ready([1], {})]
        costs_s = []
        for _ in range(num_tokens):
            token = drawn(rng, port.masks[0, 0].view(np.uint8))
            begin = time.perf_counter()
            port.send(Advance([1], [token], [], {}))
            if _answers(port) != [Ready([1], {})]:
                break
            costs_s.append(time.perf_counter() - begin)
    finally:
        port.close()
    return {"round_trip_us_p50": round(1e6 * float(np.median(costs_s)), 1), "open_s": round(opened_s, 3)}


async def ask_all(url: str) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    turn = asyncio.Semaphore(AT_ONCE)

    async def ask(session: aiohttp.ClientSession, seed: int) -> None:
        made = schema(seed)
        wanted = {"type": "json_schema", "json_schema": {"name": "made", "schema": made, "strict": True}}
        body = {
            "model": "feather",
            "messages": [{"role": "user", "content": "Answer."}],
            "response_format": wanted,
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "seed": seed,
        }
        async with turn, session.post(url + "/v1/chat/completions", json=body) as response:
            answer = await response.json()
        if response.status == 400:
            # an everyday schema must not be refused without a reason
            counts["refused" if answer["error"]["param"].startswith("response_format") else "other_error"] += 1
        elif response.status != 200:
            counts["other_error"] += 1
        elif (choice := answer["choices"][0])["finish_reason"] == "length":
            counts["length"] += 1
        else:
            valid = is_valid(made, choice["message"]["content"])
            counts["valid" if valid else "invalid"] += 1
            if not valid:
                print(f"seed {seed}: {choice['message']['content']!r} does not follow {json.dumps(made)}", file=sys.stderr)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        await asyncio.gather(*(ask(session, seed) for seed in range(NUM_SCHEMAS)))
    return counts


def run() -> list[dict[str, Any]]:
    folder = make(STORE, "feather")
    line: dict[str, Any] = {"benchmark": "grammar", "vocab_size": VOCAB_SIZE, **mask_costs(folder), **round_trips(folder)}
    with Server(STORE, ["cpu=2GiB"]) as server:
        server.cli("load", "feather")
        begin = time.perf_counter()
        counts = asyncio.run(ask_all(server.url))
        line["seconds"] = round(time.perf_counter() - begin, 1)
    kinds = ("valid", "invalid", "refused", "length", "other_error")
    return [{**line, "schemas": NUM_SCHEMAS, **{kind: counts[kind] for kind in kinds}}]


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line), flush=True)
