"""Minutes of loads, evictions and chats: memory, descriptors and mappings of daemon and engine must stay what they are.

Three copies of a model and memory for two: a request for the one that is not there evicts another, whose weights wait in the host
tier. Every so often one goes to disk, and two are asked at once. Growth is that of a straight line through the second half.
usage: python -m benchmarks.soak [--minutes 30]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import shutil
import tempfile
import time
import urllib.request
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmarks.checkpoints import make
from benchmarks.load import drive
from benchmarks.serve import STORE
from benchmarks.server import Server
from tests.e2e.processes import anonymous_bytes

NAMES = ("first", "second", "third")
SAMPLE_EVERY_S = 2.0


def sample(pid: int) -> dict[str, int]:
    """anonymous_bytes: the resident set without files and shared memory, the device's chunks among those."""
    process = psutil.Process(pid)
    return {
        "rss_bytes": process.memory_info().rss,
        "anonymous_bytes": anonymous_bytes(pid),
        "descriptors": process.num_fds(),
        "mappings": len(pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()),
        "threads": process.num_threads(),
    }


def growth_percent(stamps: list[float], values: list[int]) -> float:
    """Returns the growth of a straight line through these samples, from its beginning to its end."""
    slope, start = np.polyfit(np.array(stamps) - stamps[0], values, 1)
    return round(float(slope * (stamps[-1] - stamps[0]) / max(start, 1.0) * 100), 2)


def run(minutes: float, device: str, host_tier: str) -> list[dict[str, Any]]:
    feather = make(STORE, "feather")
    draw = random.Random(0)
    samples: dict[str, list[dict[str, int]]] = {"daemon": [], "engine": []}
    stamps: list[float] = []
    num_requests = num_failed = rounds = 0
    with tempfile.TemporaryDirectory(prefix="hearth-soak-") as folder:
        for name in NAMES:
            shutil.copytree(feather, pathlib.Path(folder) / name)
        flags = ["--dtype", "float32", "--host-tier-bytes", host_tier, "--max-num-batched-tokens", "512"]
        with Server(pathlib.Path(folder), [f"cpu={device}"], flags) as server:
            end_s = time.monotonic() + 60 * minutes
            (engine,) = server.engines()
            while time.monotonic() < end_s:
                rounds += 1
                if rounds % 20 == 0:
                    server.cli("unload", draw.choice(NAMES), "--to", "cold", check=False)
                names = draw.sample(NAMES, 1 + (rounds % 5 == 0))
                results = uvloop.run(drive(server.url, names, 6, 6, draw.choice((20, 60, 150)), draw.choice((8, 30)), rounds))
                num_requests += len(results)
                num_failed += sum(not result.ok for result in results)
                if not stamps or time.monotonic() - stamps[-1] >= SAMPLE_EVERY_S:
                    stamps.append(time.monotonic())
                    samples["daemon"].append(sample(server.pid))
                    samples["engine"].append(sample(engine.pid))
            metrics = urllib.request.urlopen(server.url + "/metrics", timeout=10).read().decode()
            restarts = server.cli("status", "--json")["engine_restarts"]
    half = len(stamps) // 2
    swaps = [
        line.split() for line in metrics.splitlines() if line.startswith(("hearth_swap_ins_total{", "hearth_swap_outs_total{"))
    ]
    row: dict[str, Any] = {
        "benchmark": "soak",
        "minutes": round((stamps[-1] - stamps[0]) / 60, 1),
        "samples": len(stamps),
        "requests": num_requests,
        "failed": num_failed,
        "engine_restarts": restarts,
        "swaps": {name.removeprefix("hearth_swap_"): int(float(count)) for name, count in swaps if float(count)},
    }
    for who, found in samples.items():
        for what in found[0]:
            values = [each[what] for each in found]
            unit = 1 << 20 if what.endswith("_bytes") else 1
            name = what.replace("_bytes", "_mib")
            row[f"{who}_{name}"] = [round(values[0] / unit, 1), round(values[half] / unit, 1), round(values[-1] / unit, 1)]
            row[f"{who}_{name}_growth_percent"] = growth_percent(stamps[half:], values[half:])
    return [row]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--device", default="48MiB", help="the cpu device's budget: for two of the models")
    parser.add_argument("--host-tier", default="64MiB")
    options = parser.parse_args()
    for row in run(options.minutes, options.device, options.host_tier):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
