"""Streams that are paused for other models' overdue work: whether all of them go on, with what text, and what they are told.

Three models of 125 M parameters on a device with room for one. Streams run on the first; while they do, somebody asks the other
two, in turn. With host memory, where KV is saved, and without, where it is computed again. The texts are compared with those of the
same streams undisturbed; two undisturbed runs are compared as well, for in bfloat16 a step of other rows rounds otherwise.
usage: python -m benchmarks.pauses [--streams 8] [--tokens 400] [--asked 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import tempfile
import time
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.checkpoints import link_models, make
from benchmarks.cohost import scraped
from benchmarks.load import Result, percentile, stream_one
from benchmarks.serve import STORE
from benchmarks.server import Server

STREAMING, ASKED = "streaming", ("asked-1", "asked-2")
VOCABULARY = range(300, 30_000)
COMMENT_EVERY_S = 0.1
WAYS = (("bfloat16", "1GiB"), ("float32", "2GiB"), ("float32", "0"))
FLAGS = ["--overdue-after-s", "0.5", "--preempt-after-s", "0.5", "--sse-comment-every-s", str(COMMENT_EVERY_S)]


class Client:
    def __init__(self, server: Server) -> None:
        where = urlsplit(server.url)
        self._host, self._port = str(where.hostname), int(where.port or 80)

    async def ask(self, model: str, seed: int, num_out: int, followed: list[Result] | None = None) -> Result:
        body: dict[str, object] = {
            "model": model,
            "prompt": random.Random(seed).choices(VOCABULARY, k=64),
            "max_tokens": num_out,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return await stream_one(self._host, self._port, body, keep_text=True, followed=followed)

    async def streams(self, num: int, num_out: int, asked: int = 0) -> tuple[list[Result], list[Result]]:
        """(the streams, the others' requests): `asked` of them, one after the other, each once all streams are on their way."""
        followed: list[Result] = []
        work = [asyncio.create_task(self.ask(STREAMING, seed, num_out, followed)) for seed in range(num)]
        others = []
        for number in range(asked):
            before = [len(result.stamps) for result in followed]
            while len(before) < num or any(len(r.stamps) < b + 8 and not r.ended for r, b in zip(followed, before, strict=True)):
                await asyncio.sleep(0.02)
                before += [0] * (len(followed) - len(before))
            others.append(await self.ask(ASKED[number % len(ASKED)], 1000 + number, 8))
        return list(await asyncio.gather(*work)), others


def text_of(result: Result) -> str:
    events = [line[6:] for line in result.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def num_same(some: list[Result], others: list[Result]) -> int:
    return sum(text_of(one) == text_of(other) for one, other in zip(some, others, strict=True))


def longest_gap_s(result: Result) -> float:
    return max((b - a for a, b in zip(result.stamps, result.stamps[1:], strict=False)), default=0.0)


def run(num: int, num_out: int, asked: int, dtype: str, host_tier: str) -> dict[str, Any]:
    checkpoint = make(STORE, "mid")
    with tempfile.TemporaryDirectory(prefix="hearth-pauses-", dir=STORE.parent) as place:
        models = pathlib.Path(place)
        link_models(models, checkpoint, STREAMING, *ASKED)
        weights_mib = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) >> 20
        size = 2 if dtype == "float32" else 1
        budget = f"cpu={size * weights_mib * 3 // 2 + 100}MiB"  # two do not fit
        flags = [*FLAGS, "--dtype", dtype, "--host-tier-bytes", host_tier, "--max-num-batched-tokens", "512"]
        with Server(models, [budget], flags) as server:
            client = Client(server)
            for name in (*ASKED, STREAMING):  # what a load takes is known
                server.cli("load", name)
            undisturbed, _ = uvloop.run(client.streams(num, num_out))
            again, _ = uvloop.run(client.streams(num, num_out))
            server.cli("unload", STREAMING)
            server.cli("load", STREAMING)  # without cached prefixes
            before, begin_s = scraped(server.url), time.perf_counter()
            streams, others = uvloop.run(client.streams(num, num_out, asked))
            wall_s = time.perf_counter() - begin_s
            counted = scraped(server.url) - before
    told = [result.usage["hearth"] for result in streams if "hearth" in result.usage]
    return {
        "benchmark": "pauses",
        "dtype": dtype,
        "host_tier": host_tier,
        "streams": num,
        "tokens": num_out,
        "asked": asked,
        "pauses": int(counted["hearth_model_preemptions_total"]),
        "requests_paused": int(counted["hearth_requests_paused_total"]),
        "failed": sum(not result.ok for result in (*streams, *others)),
        "errors": sorted({result.error[:120] for result in (*streams, *others) if result.error}),
        "tokens_missing": sum(num_out - result.completion_tokens for result in streams),
        "comments": sum(result.text.count("\n: waiting\n") for result in streams),
        "usage_tells": len(told),
        "restored_tokens": sum(one["restored_tokens"] for one in told),
        "recomputed_tokens": sum(one["recomputed_tokens"] for one in told),
        "texts_same": num_same(undisturbed, streams),
        "texts_same_undisturbed": num_same(undisturbed, again),
        "longest_gap_s": round(max(map(longest_gap_s, streams)), 2),
        "others_first_token_s": round(percentile([r.stamps[0] - r.started for r in others if r.stamps], 0.5), 2),
        "out_of_memory": int(counted["hearth_out_of_memory_total"]),
        "wall_s": round(wall_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--asked", type=int, default=3)
    options = parser.parse_args()
    for dtype, host_tier in WAYS:
        print(json.dumps(run(options.streams, options.tokens, options.asked, dtype, host_tier)), flush=True)


if __name__ == "__main__":
    main()
