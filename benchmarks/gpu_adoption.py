"""An engine killed while it serves from the GPU, and the next one with the weights that the first has left there: seconds from the
kill to the next token, bytes read, seconds of copying. Three kills: the third engine in a row to die early gives its memory up
(daemon/engines/left_memory.py), so the last one loads from the files again, in the same run. Then a kill without adoption, under
streams that must go on. One JSON line each.

usage: python -m benchmarks.gpu_adoption [--tiny]: without a GPU a small model computed on the CPU, to show that the script runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks import gpu_checkpoints
from benchmarks.gpu_node import Node, main, settings
from benchmarks.gpu_texts import Question, answer, text_of
from benchmarks.load import Result, stream_one
from benchmarks.server import Server

MODEL = "a"
# so many chunks has an engine to map, whatever the model
NODE = Node({MODEL: "1b"}, 1, max_model_len=4096, budget_bytes=70 << 30)
KILLS = 3
STREAMS, STREAMED_TOKENS = 8, 1500
NUM_TOKENS = 16
SERVING_LIMIT_S, RETRY_S = 60.0, 0.05
SUMMED_UP_S = 2.0  # an engine sums its weights up once it serves with them; until then it leaves none


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_adoption"} | figures), flush=True)


def request(server: Server) -> Result:
    where = urlsplit(server.url)
    assert where.hostname is not None
    assert where.port is not None
    body: dict[str, object] = {
        "model": MODEL,
        "prompt": "stream token layer block weight cache page model",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return uvloop.run(stream_one(where.hostname, where.port, body, keep_text=True))


def served(server: Server) -> tuple[Result, int]:
    """The first request that is answered, and how many were not. Exits with the last error after SERVING_LIMIT_S."""
    began_s, refused = time.perf_counter(), 0
    while not (result := request(server)).ok:
        refused += 1
        if time.perf_counter() - began_s > SERVING_LIMIT_S:
            sys.exit(f"not served again within {SERVING_LIMIT_S:.0f} s: {result.status} {result.error}\n{server.log_end()}")
        time.sleep(RETRY_S)
    return result, refused


def last_load(server: Server) -> dict[str, Any]:
    events = [json.loads(line) for line in server.text("events", "--json").splitlines()]
    return dict([event for event in events if event["event"] == "loaded"][-1])


def killed(server: Server, number: int, expected: str) -> dict[str, Any]:
    """Kills the engine and asks at once."""
    time.sleep(SUMMED_UP_S)
    copied_s = copy_s(server)
    (engine,) = server.engines()
    os.kill(engine.pid, signal.SIGKILL)
    killed_s = time.perf_counter()
    result, refused = served(server)
    load = last_load(server)
    line = {
        "what": "engine killed",
        "kill": number,
        "adopted": load["adopted"],
        "to_first_token_s": round(result.stamps[0] - killed_s, 3),
        "of_which_load_s": round(load["seconds"], 3),
        "bytes_read": load["bytes_read"],
        "copy_s": round(copy_s(server) - copied_s, 3),
        "requests_refused": refused,
        "same_text": text_of(result.text) == expected,
    }
    tell(**line)
    return line


def copy_s(server: Server) -> float:
    """Seconds that loads have copied for, from host memory to the device."""
    return server.metric('hearth_swap_seconds_total{phase="copy"}')


async def streams_over_a_kill(server: Server, num_tokens: int) -> tuple[int, float]:
    """Kills the engine while it streams. Returns how many streams had no whole answer, and the seconds until the last one ended."""
    where = urlsplit(server.url)
    asked = [Question(MODEL, number, num_tokens) for number in range(STREAMS)]
    answers = [asyncio.create_task(answer(str(where.hostname), int(where.port or 80), one)) for one in asked]
    await asyncio.sleep(0.3)
    killed_s = time.perf_counter()
    (engine,) = server.engines()
    os.kill(engine.pid, signal.SIGKILL)
    texts = await asyncio.gather(*answers)
    return texts.count(""), time.perf_counter() - killed_s


def _check_texts(lines: list[dict[str, Any]], tiny: bool, server: Server) -> None:
    """Exits if a text is another one in float32. In bfloat16 a new engine may have measured another kernel to be the faster one for
    few rows, and rounds otherwise then: that is told, and no failure."""
    if tiny and not all(line["same_text"] for line in lines):
        sys.exit(f"the text after a kill is another one\n{server.log_end()}")


def run(folder: pathlib.Path, tiny: bool) -> None:
    began_s = time.perf_counter()
    (num_bytes,) = gpu_checkpoints.make_apart(folder, {MODEL: "tiny" if tiny else "1b"}, "cpu" if tiny else "cuda")
    tell(what="made", gib=round(num_bytes / 2**30, 3), seconds=round(time.perf_counter() - began_s, 1))
    devices, flags = [NODE.device], NODE.flags(folder)
    if tiny:
        devices, flags = ["cpu:0=64MiB"], ["--dtype", "float32", "--threads", "1", *settings(folder, [MODEL], 4096)]
    flags += ["--host-tier-bytes", "0", "--load-deadline-s", "90", "--max-wait-s", "90"]
    with Server(folder, devices, [*flags, "--adopt-weights", "true"]) as server:
        first, _ = served(server)
        load = last_load(server)
        tell(what="first load", ready_s=round(server.ready_s, 2), load_s=round(load["seconds"], 3), bytes_read=load["bytes_read"])
        lines = [killed(server, number, text_of(first.text)) for number in range(1, KILLS + 1)]
        told = [(line["adopted"], line["bytes_read"] == 0, line["copy_s"] == 0.0) for line in lines]
        if told != [(True, True, True)] * (KILLS - 1) + [(False, False, True)]:
            sys.exit(f"adopted, nothing read, nothing copied, kill by kill: {told}\n{server.log_end()}")
        _check_texts(lines, tiny, server)
    with Server(folder, devices, [*flags, "--adopt-weights", "false"]) as server:
        served(server)
        failed, seconds = uvloop.run(streams_over_a_kill(server, STREAMED_TOKENS))
        load = last_load(server)
        tell(
            what="streams over a kill",
            streams=STREAMS,
            failed=failed,
            all_ended_s=round(seconds, 2),
            load_s=round(load["seconds"], 3),
            adopted=load["adopted"],
            bytes_read=load["bytes_read"],
        )
        line = killed(server, 1, text_of(first.text))
        _check_texts([line], tiny, server)
        if failed or load["adopted"] or line["adopted"]:
            sys.exit(f"{failed} streams failed; adopted: {load['adopted']}, {line['adopted']}\n{server.log_end()}")


if __name__ == "__main__":
    main("benchmarks.gpu_adoption", __doc__, NODE, run)
