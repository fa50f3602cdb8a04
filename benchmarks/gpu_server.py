"""The daemon on a GPU, from the file to the socket. `serve`: an 8B model, cold and warm loads, 200 streams of chat-like lengths
with the CPU of the whole process tree, and the same held to half a core. `cohost`: three 1B models where two have room.

usage: python -m benchmarks.gpu_server [--what serve|cohost] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import uvloop

from benchmarks import gpu_checkpoints
from benchmarks.confined import confined
from benchmarks.gpu_throughput import lengths
from benchmarks.load import drive_lengths, summary, tree_cpu_s, tree_rss_bytes
from benchmarks.server import Server
from config.units import machine_memory_bytes

HALF = 0.5


def tell(**line: Any) -> None:
    print(json.dumps({"benchmark": "gpu_server"} | line), flush=True)


def drop_from_page_cache(folder: pathlib.Path) -> None:
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def load(server: Server, name: str, num_bytes: int, what: str) -> None:
    began_s = time.perf_counter()
    server.cli("load", name, "--json")
    seconds = time.perf_counter() - began_s
    tell(what=what, model=name, seconds=round(seconds, 2), gb_per_s=round(num_bytes / seconds / 1e9, 2))


def measured(server: Server, models: Sequence[str], pairs: Sequence[tuple[int, int]], streams: int) -> dict[str, object]:
    cpu_s, began_s = tree_cpu_s(server.pid), time.perf_counter()
    results = uvloop.run(drive_lengths(server.url, models, pairs, streams, seed=3))
    seconds = time.perf_counter() - began_s
    return summary(results, seconds, tree_cpu_s(server.pid) - cpu_s, tree_rss_bytes(server.pid))


def settings(folder: pathlib.Path, models: Sequence[str], max_model_len: int) -> list[str]:
    """Flags for a file with the longest context of each model: by default a quarter of the device is kept for one such request."""
    path = folder / "node.toml"
    path.write_text("".join(f'[models."{name}"]\nmax_model_len = {max_model_len}\n' for name in models))
    return ["--config", str(path)]


def host_tier(wanted_gib: int) -> str:
    """Less on a machine that has less now: a virtual one may get its memory as it is used, and the daemon refuses what it does not
    see."""
    return f"{min(wanted_gib << 10, machine_memory_bytes() * 3 // 4 >> 20)}MiB"


def counter(server: Server, family: str) -> int:
    """The sum of one metric over its labels."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as response:
        text = response.read().decode()
    return int(sum(float(value) for value in re.findall(rf"^{family}{{[^}}]*}} (\S+)$", text, re.M)))


def serve(folder: pathlib.Path, tiny: bool) -> None:
    name = "tiny" if tiny else "8b"
    began_s = time.perf_counter()
    num_bytes = gpu_checkpoints.make(folder / name, name, "cpu" if tiny else "cuda")
    tell(what="made", model=name, gib=round(num_bytes / 2**30, 2), seconds=round(time.perf_counter() - began_s, 1))
    pairs = lengths(6, 6, 4) if tiny else lengths(200, 220, 200)
    devices = ["cpu=256MiB"] if tiny else ["cuda:0=70GiB"]
    flags = ["--runner", "null", "--null-step-ms", "1"] if tiny else ["--max-num-batched-tokens", "8192"]
    flags += ["--max-queued-per-model", "512", "--host-tier-bytes", host_tier(1 if tiny else 20)]
    with Server(folder, devices, [*flags, *settings(folder, [name], 256 if tiny else 8192)]) as server:
        tell(what="ready", seconds=round(server.ready_s, 2), gpus=server.cli("gpus", "--json", check=False) if not tiny else [])
        drop_from_page_cache(folder / name)
        load(server, name, num_bytes, "cold_load")
        measured(server, [name], pairs[:8], 8)
        free = measured(server, [name], pairs, len(pairs))
        tell(what="streams", model=name, streams=len(pairs), confined="no", **free)
        with confined(server.pid, HALF, with_groups=not tiny) as how:
            held = measured(server, [name], pairs, len(pairs))
        share = float(str(held["out_tok_s"])) / float(str(free["out_tok_s"]))
        tell(what="streams", model=name, streams=len(pairs), confined=how, of_free=round(share, 3), **held)
        server.cli("unload", name, "--to", "warm", "--json", check=False)
        load(server, name, num_bytes, "load_from_host_memory")
        tell(what="after", devices=server.cli("status", "--json")["devices"])


def cohost(folder: pathlib.Path, tiny: bool) -> None:
    kind = "tiny" if tiny else "1b"
    num_bytes = gpu_checkpoints.make(folder / "a", kind, "cpu" if tiny else "cuda")
    for name in "bc":
        shutil.copytree(folder / "a", folder / name)
    # room for two of the three, each with one request's KV, and for what steps compute with
    devices = ["cpu=4864KiB"] if tiny else [f"cuda:0={int(2.4 * num_bytes + (800 << 20))}"]
    flags = ["--runner", "null", "--null-step-ms", "1", "--chunk-bytes", "64KiB"] if tiny else ["--max-num-batched-tokens", "2048"]
    flags += ["--host-tier-bytes", "64MiB" if tiny else host_tier(16), "--max-wait-s", "120"]
    with Server(folder, devices, [*flags, *settings(folder, "abc", 256 if tiny else 4096)]) as server:
        measured(server, ["a", "b", "c"], [(8, 4)] * 3, 1)
        before = counter(server, "hearth_swap_ins_total")
        pairs = lengths(9, 6, 4) if tiny else lengths(90, 220, 100)
        line = measured(server, ["a", "b", "c"], pairs, min(24, len(pairs)))
        swaps = counter(server, "hearth_swap_ins_total") - before
        swap_rows = [row for row in server.cli("history", "--json") if row["load_s"] > 0]
        loads_s = sorted(row["load_s"] for row in swap_rows if row["source"] == "host")
        tell(
            what="cohost",
            models=3,
            swaps=swaps,
            swap_in_s_median=round(loads_s[len(loads_s) // 2], 3) if loads_s else None,
            gb_per_s=round(num_bytes / loads_s[len(loads_s) // 2] / 1e9, 1) if loads_s else None,
            preemptions=counter(server, "hearth_model_preemptions_total"),
            **line,
        )
    if line["failed"] or not swaps:
        sys.exit(f"cohost: {line['failed']} requests failed, {swaps} swaps: {line['errors']}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", default="serve", choices=("serve", "cohost"))
    parser.add_argument("--tiny", action="store_true", help="a model that only pretends to compute, on the cpu device")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hearth-gpu-") as name:
        (serve if options.what == "serve" else cohost)(pathlib.Path(name), options.tiny)


if __name__ == "__main__":
    main()
