"""The daemon on a GPU, from the file to the socket. `serve`: an 8B model on the default budget: start and cold load, first with no
compiled kernels and then with those, beside a raw read of the files, 200 streams of chat-like lengths with the CPU of the whole
process tree, an eviction to host memory and the load back. `confined`: the streams again, held to half a core. `cohost`: three 1B
models where two have room, and their answers compared with those of each model alone. One JSON line each; exits 1 where weights
came from elsewhere than asked, a request failed or a text differed.

usage: python -m benchmarks.gpu_server [--what serve|confined|cohost] [--tiny]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks import gpu_checkpoints
from benchmarks.confined import confined
from benchmarks.gpu_drives import checkpoints_folder
from benchmarks.gpu_node import TINY, Node, host_tier, last_source, settings
from benchmarks.gpu_texts import Question, answer, compared
from benchmarks.gpu_throughput import lengths
from benchmarks.load import cpu_s_by_name, drive_lengths, summary, tree_rss_bytes
from benchmarks.loading import MIB, raw, set_cache
from benchmarks.server import CACHE, Server

HALF = 0.5
SERVE = Node({"8b": "8b"}, 1, max_model_len=8192, max_num_batched_tokens=8192, host_tier_bytes=20 << 30)
# room for two of the three, each with one request's KV, and for what steps compute with
COHOST = Node(
    {"a": "1b", "b": "1b", "c": "1b"},
    2,
    max_model_len=4096,
    max_num_batched_tokens=2048,
    budget_bytes=15 << 29,
    host_tier_bytes=16 << 30,
    same_files=True,
)
TINY_NULL = ["--runner", "null", "--null-step-ms", "1"]
NUM_TEXTS, TEXT_TOKENS = 4, 120  # answers of each model that are compared


def tell(**line: Any) -> None:
    print(json.dumps({"benchmark": "gpu_server"} | line), flush=True)


def load(server: Server, name: str, num_bytes: int, what: str, source: str, raw_s: float = 0.0, **more: Any) -> bool:
    """Loads a model. Returns whether its weights came from `source`. raw_s: seconds of a raw read of its files; 0: unknown."""
    began_s = time.perf_counter()
    server.cli("load", name, "--json")
    seconds, found = time.perf_counter() - began_s, last_source(server, name)
    rate = round(num_bytes / seconds / 1e9, 2)
    more |= {"of_raw": round(raw_s / seconds, 3)} if raw_s else {}
    tell(what=what, model=name, source=found, as_asked=found == source, seconds=round(seconds, 2), gb_per_s=rate, **more)
    return found == source


def raw_read_s(folder: pathlib.Path, name: str) -> float:
    """Reads the weights' files around the page cache, and returns how many seconds that took."""
    files = list((folder / name).glob("*.safetensors"))
    read, num_bytes = raw(files, 2, 8 * MIB, huge=True, direct=True), sum(file.stat().st_size for file in files)
    began_s = time.perf_counter()
    read()
    seconds = time.perf_counter() - began_s
    tell(what="raw read", model=name, seconds=round(seconds, 2), gb_per_s=round(num_bytes / seconds / 1e9, 2))
    return seconds


def measured(server: Server, models: Sequence[str], pairs: Sequence[tuple[int, int]], streams: int) -> dict[str, object]:
    before, began_s = cpu_s_by_name(server.pid), time.perf_counter()
    results = uvloop.run(drive_lengths(server.url, models, pairs, streams, seed=3))
    seconds = time.perf_counter() - began_s
    spent = {name: cpu_s - before.get(name, 0.0) for name, cpu_s in cpu_s_by_name(server.pid).items()}
    line = summary(results, seconds, sum(spent.values()), tree_rss_bytes(server.pid))
    return line | {"cpu_s_by_process": {name: round(cpu_s, 2) for name, cpu_s in spent.items() if cpu_s >= 0.005}}


def counter(server: Server, family: str) -> int:
    """Returns the sum of one metric over its labels."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as response:
        text = response.read().decode()
    return int(sum(float(value) for value in re.findall(rf"^{family}{{[^}}]*}} (\S+)$", text, re.M)))


def dropped(folder: pathlib.Path, name: str) -> bool:
    """Drops the weights from the page cache. Returns whether nothing of them is left there: some kernels keep what they like."""
    try:
        set_cache(list((folder / name).glob("*.safetensors")), warm=False)
    except SystemExit as error:
        tell(what="page cache", why=str(error))
        return False
    return True


def memory_of(gpus: Any) -> dict[str, float]:
    """Returns what of the device is in use and free, GiB, as the driver tells the daemon. {} without a GPU."""
    if not isinstance(gpus, list) or not gpus:
        return {}
    total, used = gpus[0]["total_bytes"], gpus[0]["used_bytes"]
    return {"used_gib": round(used / 2**30, 2), "free_gib": round((total - used) / 2**30, 2)}


def serve(folder: pathlib.Path, tiny: bool, confine: bool) -> None:
    name = "tiny" if tiny else "8b"
    began_s = time.perf_counter()
    (num_bytes,) = gpu_checkpoints.make_apart(folder, {name: name}, "cpu" if tiny else "cuda")
    tell(what="made", model=name, gib=round(num_bytes / 2**30, 2), seconds=round(time.perf_counter() - began_s, 1))
    pairs = lengths(6, 6, 4) if tiny else lengths(200, 220, 200)
    devices = ["cpu=256MiB"] if tiny else [SERVE.device]
    flags = [*TINY_NULL, *host_tier(1 << 30), *settings(folder, [name], 256)] if tiny else SERVE.flags(folder)
    flags += ["--max-queued-per-model", "512"]
    right = []
    with tempfile.TemporaryDirectory(prefix="hearth-kernels-") as cache:
        if not confine:
            right.append(dropped(folder, name))
            with Server(folder, devices, flags, pathlib.Path(cache)) as server:
                ready_s = round(server.ready_s, 2)
                right.append(load(server, name, num_bytes, "cold_load", "disk", compiled_kernels=False, ready_s=ready_s))
            if (compiled := pathlib.Path(cache) / "triton").is_dir():  # so that parts after this one need not compile them again
                shutil.copytree(compiled, CACHE / "triton", dirs_exist_ok=True)
        right.append(dropped(folder, name))
        raw_s = 0.0 if confine else raw_read_s(folder, name)
        with Server(folder, devices, flags, pathlib.Path(cache)) as server:
            about = {"compiled_kernels": not confine, "ready_s": round(server.ready_s, 2)}
            right.append(load(server, name, num_bytes, "cold_load", "disk", raw_s, **about))
            measured(server, [name], pairs, len(pairs))  # captures the graphs that its steps need
            free = measured(server, [name], pairs, len(pairs))
            tell(what="streams", model=name, streams=len(pairs), confined="no", **free)
            if confine:
                with confined(server.pid, HALF, with_groups=not tiny) as how:
                    held = measured(server, [name], pairs, len(pairs))
                share = float(str(held["out_tok_s"])) / float(str(free["out_tok_s"]))
                tell(what="streams", model=name, streams=len(pairs), confined=how, of_free=round(share, 3), **held)
            if not tiny:
                tell(what="device", **memory_of(server.cli("gpus", "--json")))
            server.cli("unload", name, "--to", "warm", "--json")
            right.append(load(server, name, num_bytes, "load_from_host_memory", "host"))
            server.cli("unload", name, "--json")
            right.append(dropped(folder, name))
            right.append(load(server, name, num_bytes, "cold_load_again", "disk", raw_s))
            failed = free["failed"]
    if failed or not all(right):
        sys.exit(f"serve: {failed} requests failed: {free['errors']}; cold, and from the source asked for: {right}")


async def texts_of(server: Server, names: Sequence[str], together: bool) -> dict[Question, str]:
    """Returns the answers to NUM_TEXTS questions to each model, one at a time for each: all models at once, or one after the
    other."""
    where, texts = urlsplit(server.url), dict[Question, str]()

    async def one(name: str) -> None:
        for number in range(NUM_TEXTS):
            asked = Question(name, number, TEXT_TOKENS)
            texts[asked] = await answer(str(where.hostname), int(where.port or 80), asked)

    if together:
        await asyncio.gather(*map(one, names))
    else:
        for name in names:
            await one(name)
    return texts


def cohost(folder: pathlib.Path, tiny: bool) -> None:
    kind, names = "tiny" if tiny else "1b", list(COHOST.models)
    (num_bytes,) = gpu_checkpoints.make_apart(folder, {"a": kind}, "cpu" if tiny else "cuda")
    for name in names[1:]:
        gpu_checkpoints.link(folder / "a", folder / name)
    devices = ["cpu=7552KiB"] if tiny else [COHOST.device]
    tiny_flags = [*TINY, "--chunk-bytes", "64KiB", *host_tier(64 << 20), *settings(folder, names, 256)]
    flags = [*(tiny_flags if tiny else COHOST.flags(folder)), "--max-wait-s", "120"]
    with Server(folder, devices, flags) as server:
        measured(server, names, [(8, 4)] * 3, 1)
        before = counter(server, "hearth_swap_ins_total")
        pairs = lengths(9, 6, 4) if tiny else lengths(90, 220, 100)
        line = measured(server, names, pairs, min(24, len(pairs)))
        swaps = counter(server, "hearth_swap_ins_total") - before
        rows = [row for row in server.cli("history", "--json") if row["load_s"] > 0]
        loads_s = sorted(row["load_s"] for row in rows if row["source"] == "host")
        tell(
            what="cohost",
            models=len(names),
            swaps=swaps,
            from_host=len(loads_s),
            swap_in_s_median=round(loads_s[len(loads_s) // 2], 3) if loads_s else None,
            gb_per_s=round(num_bytes / loads_s[len(loads_s) // 2] / 1e9, 1) if loads_s else None,
            preemptions=counter(server, "hearth_model_preemptions_total"),
            **line,
        )
        first, again = (uvloop.run(texts_of(server, names, together=False)) for _ in range(2))
        before, paused = counter(server, "hearth_swap_ins_total"), counter(server, "hearth_requests_paused_total")
        found = compared(first, again, uvloop.run(texts_of(server, names, together=True)))
        tell(
            what="texts",
            swaps=counter(server, "hearth_swap_ins_total") - before,
            requests_paused=counter(server, "hearth_requests_paused_total") - paused,
            **found,
        )
    if line["failed"] or not swaps or not loads_s or found["differing"] or found["no_answer"]:
        why = f"{line['failed']} requests failed, {swaps} swaps, {len(loads_s)} from host memory: {line['errors']}; texts: {found}"
        sys.exit(f"cohost: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", default="serve", choices=("serve", "confined", "cohost"))
    parser.add_argument("--tiny", action="store_true", help="a model that only pretends to compute, on the cpu device")
    options = parser.parse_args()
    node = COHOST if options.what == "cohost" else SERVE
    with checkpoints_folder(0 if options.tiny else node.disk_bytes()) as folder:
        if options.what == "cohost":
            cohost(folder, options.tiny)
        else:
            serve(folder, options.tiny, options.what == "confined")


if __name__ == "__main__":
    main()
