"""The memory limit that `hearth doctor` names, tried: a node in a control group of that size compiles its kernels, takes models in
turn that do not fit together, and answers streams. Told: what its processes took at most (resident memory and memfds, without
files in the page cache), what the kernel ended, and requests that failed. Needs the right to make control groups.

usage: python -m benchmarks.memory_limit [--seconds 120] [--share 1.0]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import threading
import time
from collections import Counter
from typing import Any

import uvloop

from benchmarks.checkpoints import link_models, make
from benchmarks.load import Result, drive
from benchmarks.serve import STORE
from benchmarks.server import Server
from daemon.cli.doctor.memory import needed_bytes
from engine.host.process import num_cores
from engine.host.processor import this_processor
from tests.chaos.memory import Groups

GIB = 1 << 30
DEVICE_BYTES, TIER_BYTES = 1 * GIB, GIB // 2
MODELS, STREAMS, WORDS_IN, TOKENS_OUT = 6, 16, 64, 64  # six models of 250 MB; three have room
LOOK_EVERY_S = 0.1
# a group's files, of control groups version 1 and 2: lines of memory.stat that count, and where ended processes are counted
COUNTED = (("rss", "shmem"), ("anon", "shmem"))
KILLS = ("memory.oom_control", "memory.events")


class Watch:
    """Watches in a thread how much memory a group takes. most_bytes: so far."""

    def __init__(self, group: pathlib.Path) -> None:
        self.most_bytes, self._group, self._done = 0, group, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(LOOK_EVERY_S):
            stat = fields(self._group / "memory.stat")
            counted = next(names for names in COUNTED if names[0] in stat)
            self.most_bytes = max(self.most_bytes, sum(stat[name] for name in counted))


def fields(path: pathlib.Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}


def kills(group: pathlib.Path) -> int:
    return next(fields(group / name)["oom_kill"] for name in KILLS if (group / name).exists())


def serve(seconds: float, group: pathlib.Path) -> dict[str, Any]:
    mid, results = make(STORE, "mid"), list[Result]()
    with tempfile.TemporaryDirectory(prefix="hearth-limit-", dir=STORE.parent) as place:
        models, cache = pathlib.Path(place) / "models", pathlib.Path(place) / "cache"
        cache.mkdir()
        names = [f"mid-{number}" for number in range(MODELS)]
        link_models(models, mid, *names)
        watch = Watch(group)
        with Server(models, [f"cpu={DEVICE_BYTES}"], ["--host-tier-bytes", str(TIER_BYTES)], cache) as server:
            begin_s = time.perf_counter()
            while time.perf_counter() - begin_s < seconds:
                results += uvloop.run(drive(server.url, names, 2 * STREAMS, STREAMS, WORDS_IN, TOKENS_OUT, seed=len(results)))
            status, log = server.cli("status", "--json"), server.log.read_text()
        watch.end()
    return {
        "most_bytes": watch.most_bytes,
        "oom_kills": kills(group),
        "requests": len(results),
        "failed": sum(not one.ok for one in results),
        "errors": dict(Counter(one.error[:100] for one in results if one.error)),
        "loads": log.count("-> ready: loaded"),
        "engine_restarts": status["engine_restarts"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--share", type=float, default=1.0, help="of the limit that hearth doctor names")
    options = parser.parse_args()
    try:
        groups = Groups()
    except OSError as error:
        sys.exit(f"not run: {error}")
    named = needed_bytes({"cpu:0": DEVICE_BYTES}, TIER_BYTES, num_cores())
    limit = int(named * options.share)
    make(STORE, "mid")
    with groups.limited(limit) as group:
        found = serve(options.seconds, group)
    result = {
        "benchmark": "memory_limit",
        "processor": this_processor().describe(),
        "cores": num_cores(),
        "budget_bytes": DEVICE_BYTES,
        "host_tier_bytes": TIER_BYTES,
        "named_bytes": named,
        "limit_bytes": limit,
        **found,
        "of_limit": round(found["most_bytes"] / limit, 3),
    }
    print(f"limit {limit / GIB:.2f} GiB, most taken {found['most_bytes'] / GIB:.2f} GiB, {found['oom_kills']} killed;")
    print(f"{found['requests']} requests over {MODELS} models, {found['failed']} failed, {found['loads']} loads", flush=True)
    print(json.dumps(result))
    if found["failed"] or found["oom_kills"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
