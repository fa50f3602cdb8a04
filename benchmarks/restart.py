"""A restart of the daemon under 50 streams, as `systemctl restart` does it: how many requests fail (should be none), the longest
time that each stream is without a token, and what is read. Weights stay on the device (`adopt_weights`), KV is computed anew.

The service manager is a stand-in that keeps what the daemon stores, as systemd does (tests/daemon/service_manager.py).
usage: python -m benchmarks.restart [--model feather|mid] [--restarts N]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import pathlib
import signal
import socket
import tempfile
import time
from typing import Any

from benchmarks.checkpoints import link_models, make
from benchmarks.crash import DONE_LIMIT_S, STREAMS, all_run
from benchmarks.load import Result, drive
from benchmarks.serve import STORE
from engine.host.processor import this_processor
from tests.daemon.service_manager import NotifySocket
from tests.e2e.node import wait_gone
from tests.e2e.service_node import ServiceNode

WORDS_IN, TOKENS_OUT = 64, 400


async def scenario(node: ServiceNode, model: str) -> tuple[list[Result], float, float, float]:
    """Restarts the daemon once all streams run. Returns their results, and when that began, when the daemon had ended, and when the
    next one was ready (time.perf_counter)."""
    followed: list[Result] = []
    work = asyncio.create_task(drive(node.url, [model], STREAMS, STREAMS, WORDS_IN, TOKENS_OUT, followed=followed))
    try:
        await all_run(followed)
        begin = time.perf_counter()
        stopped, ready = await asyncio.to_thread(_restart, node)
        return await asyncio.wait_for(work, DONE_LIMIT_S), begin, stopped, ready
    finally:
        work.cancel()


def _restart(node: ServiceNode) -> tuple[float, float]:
    """Returns when the daemon had ended, and when the next one was ready with its engines."""
    assert node.process is not None
    engines = node.engine_pids()
    node.process.send_signal(signal.SIGUSR2)
    node.process.wait()
    stopped = time.perf_counter()
    node.process = None
    node.start()
    ready = time.perf_counter()
    wait_gone(engines)
    return stopped, ready


def gaps(results: list[Result], begin: float) -> list[float]:
    """Returns, shortest first, each stream's longest time without a token from the restart's begin on, if it ran then."""
    running = [result for result in results if result.stamps and result.stamps[0] < begin < result.stamps[-1]]
    stamps = [[begin, *(stamp for stamp in result.stamps if stamp > begin)] for result in running]
    return sorted(max(b - a for a, b in itertools.pairwise(each)) for each in stamps)


def run(model: str = "feather", num: int = 2) -> list[dict[str, Any]]:
    source = make(STORE, model)
    with (
        tempfile.TemporaryDirectory(prefix="hearth-restart-", dir=STORE.parent) as place,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        folder = pathlib.Path(place)
        link_models(folder / "models", source, model)
        notify = NotifySocket(folder)
        config = f'[models."{model}"]\nspeculator = "none"\n'
        flags = ["--adopt-weights", "true"]
        node = ServiceNode(folder, notify, devices=["cpu=2GiB"], runner="torch", config=config, flags=flags)
        node.listeners = [("http", listener)]
        try:
            with node:
                assert node.cli("load", model).returncode == 0
                asyncio.run(drive(node.url, [model], 4, 4, 16, 8))
                lines = [line(node, model, *asyncio.run(scenario(node, model))) for _ in range(num)]
        finally:
            notify.close()
    return lines


def line(node: ServiceNode, model: str, results: list[Result], begin: float, stopped: float, ready: float) -> dict[str, Any]:
    each = gaps(results, begin)
    loads = [json.loads(text) for text in node.cli("events", "--json").stdout.splitlines()]
    return {
        "benchmark": "restart",
        "model": model,
        "streams": len(each),
        "failed": sum(not result.ok for result in results),
        "errors": sorted({result.error[:120] for result in results if result.error}),
        "tokens_missing": sum(TOKENS_OUT - result.completion_tokens for result in results),
        "stopped_s": round(stopped - begin, 2),
        "ready_s": round(ready - begin, 2),
        "gap_median_s": round(each[len(each) // 2], 2),
        "gap_longest_s": round(each[-1], 2),
        "bytes_read_by_loads": sum(event["bytes_read"] for event in loads if event["event"] == "loaded"),
        "processor": this_processor().tier.name,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="feather")
    parser.add_argument("--restarts", type=int, default=2)
    asked = parser.parse_args()
    for told in run(asked.model, asked.restarts):
        print(json.dumps(told), flush=True)
