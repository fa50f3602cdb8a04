"""Measures what the engine's memory costs: kernels on aliased chunks against private memory, swap-in from the host tier against
memcpy, preparing, mapping, and KV to the tier and back. Ratios within one run; the rounds take turns.

usage: python -m benchmarks.memory [--mib 512] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from engine.host.process import num_cores, prepare_process

prepare_process()

import ctypes  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks import returning  # noqa: E402
from engine.cpu.memory import CpuMemory  # noqa: E402
from engine.cpu.ops import CpuOps  # noqa: E402
from engine.memory import mappings  # noqa: E402
from engine.memory.host_tier import HostTier  # noqa: E402
from engine.memory.transfers import NUM_THREADS, transfer  # noqa: E402
from engine.memory.weight_range import WeightRange  # noqa: E402

CHUNK_BYTES = 2 << 20
ops = CpuOps("")

INPUTS = 2048  # K of the matrices
MATRIX_BYTES = 16 << 20


def private(num_bytes: int, huge: bool) -> tuple[torch.Tensor, Any]:
    """The plain memory that everything is held against."""
    held = mmap.mmap(-1, num_bytes + CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    memory = torch.frombuffer(held, dtype=torch.uint8)
    skip = -memory.data_ptr() % CHUNK_BYTES
    memory = memory[skip : skip + num_bytes]
    memory.fill_(1)
    return memory, held


def aliased(num_bytes: int, huge: bool) -> tuple[torch.Tensor, Any]:
    """Chunks of a memfd in random order in a weight range, the arena mapping them too."""
    memory = CpuMemory(num_bytes // CHUNK_BYTES, CHUNK_BYTES)
    if huge:
        for chunk in range(memory.num_chunks):
            memory.prepare(chunk)
    memory.arena.fill_(1)
    weights = WeightRange(memory, num_bytes)
    weights.map(np.random.default_rng(0).permutation(memory.num_chunks).tolist())
    return weights.tensor(0, (num_bytes,), torch.uint8), memory


def per_second(num_bytes: int, work: Callable[[], Any]) -> float:
    """GB/s."""
    started_s = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - started_s) / 1e9


def layouts(num_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """Kernels over weights in each kind of memory, in turns."""
    makers = {
        "private, 4 KiB pages": lambda: private(num_bytes, False),
        "private, huge pages": lambda: private(num_bytes, True),
        "aliased chunks, 4 KiB pages": lambda: aliased(num_bytes, False),
        "aliased chunks, huge pages": lambda: aliased(num_bytes, True),
    }
    one, sixteen = torch.randn(1, INPUTS).bfloat16(), torch.randn(16, INPUTS).bfloat16()
    works: dict[str, Callable[[torch.Tensor], Any]] = {
        "decode_kernel": lambda weight: ops.linear(one, weight),
        "linear_1_row": lambda weight: torch.nn.functional.linear(one, weight),
        "linear_16_rows": lambda weight: torch.nn.functional.linear(sixteen, weight),
    }
    kept = {name: make() for name, make in makers.items()}
    matrices = {
        name: [part.view(torch.bfloat16).view(-1, INPUTS) for part in memory.split(MATRIX_BYTES)]
        for name, (memory, _) in kept.items()
    }
    figures: dict[str, dict[str, list[float]]] = {name: {work: [] for work in works} for name in kept}
    for number in range(rounds + 1):
        for name, parts in matrices.items():
            for label, work in works.items():
                speed = per_second(num_bytes, lambda work=work, parts=parts: [work(part) for part in parts])  # type: ignore[misc]
                if number:  # the first round warms caches and thread pools
                    figures[name][label].append(speed)
    rows = [
        {
            "benchmark": "memory_layout",
            "memory": name,
            **{f"{label}_gb_s": round(statistics.median(v), 1) for label, v in own.items()},
        }
        for name, own in figures.items()
    ]
    base = figures["private, huge pages"]
    for row in rows:
        for label in works:
            ratio = statistics.median(figures[str(row["memory"])][label]) / statistics.median(base[label])
            row[f"{label}_ratio"] = round(ratio, 2)
    return rows


def memcpy(pieces: list[tuple[int, Any]]) -> None:
    """Copies by as many threads as a transfer has, each with libc's memcpy."""
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes, copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None

    def work(first: int) -> None:
        for address, host in pieces[first::NUM_THREADS]:
            copy(address, host.ctypes.data, len(host))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def swap_in(num_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """Weights from the host tier into a range: mapping, page faults, checksum and all, against memcpy between prepared memory."""
    num = num_bytes // CHUNK_BYTES
    fd = os.memfd_create("tier")
    os.ftruncate(fd, num_bytes)
    tier, memory = HostTier(fd, num, CHUNK_BYTES), CpuMemory(2 * num, CHUNK_BYTES)
    draw = np.random.default_rng(1)
    order = draw.permutation(num).tolist()
    chunks = np.sort(draw.permutation(2 * num)[:num]).tolist()  # of a pool that others have cut up

    started_s = time.perf_counter()
    huge_bytes = sum(memory.prepare(chunk) for chunk in chunks)
    prepare_s = time.perf_counter() - started_s
    for slot in range(num):
        tier.prepare(slot)
        tier.slot(slot)[:] = slot % 251
    weights = WeightRange(memory, num_bytes)
    hosts = tier.pieces(order, num_bytes)
    here = list(zip(range(weights.address, weights.address + num_bytes, CHUNK_BYTES), hosts, strict=True))
    bare = [(memory.arena.data_ptr() + chunk * CHUNK_BYTES, host) for chunk, host in zip(chunks, hosts, strict=True)]
    copies: dict[str, list[float]] = {"memcpy": [], "swap_in": [], "swap_out": [], "unprepared": [], "map_share": []}
    for _ in range(rounds + 1):
        copies["memcpy"].append(per_second(num_bytes, lambda: memcpy(bare)))
        started_s = time.perf_counter()
        weights.map(chunks)
        mapped_s = time.perf_counter() - started_s
        transfer(memory.copy_in, here)
        copied_s = time.perf_counter() - started_s
        copies["swap_in"].append(num_bytes / copied_s / 1e9)
        copies["map_share"].append(mapped_s / copied_s)
        copies["swap_out"].append(per_second(num_bytes, lambda: transfer(memory.copy_out, here)))
        weights.unmap()
    for _ in range(2):
        memory.discard(0, 2 * num)
        weights.map(chunks)
        copies["unprepared"].append(per_second(num_bytes, lambda: transfer(memory.copy_in, here)))
        weights.unmap()
    median = {name: statistics.median(values[1:]) for name, values in copies.items()}
    return [
        {
            "benchmark": "memory_swap",
            "mib": num_bytes >> 20,
            "threads": NUM_THREADS,
            "memcpy_gb_s": round(median["memcpy"], 1),
            "swap_in_gb_s": round(median["swap_in"], 1),
            "swap_in_ratio": round(median["swap_in"] / median["memcpy"], 2),
            "swap_in_ratio_worst": round(min(a / b for a, b in zip(copies["swap_in"][1:], copies["memcpy"][1:], strict=True)), 2),
            "map_share_percent": round(100 * median["map_share"], 2),
            "to_tier_gb_s": round(median["swap_out"], 1),
            "unprepared_gb_s": round(median["unprepared"], 1),
            "prepare_gb_s": round(num_bytes / prepare_s / 1e9, 2),
            "huge_percent": round(100 * huge_bytes / num_bytes),
        }
    ]


def mapping(num_bytes: int) -> list[dict[str, Any]]:
    """Calls alone, chunks in order and in no order."""
    num = num_bytes // CHUNK_BYTES
    memory = CpuMemory(num, CHUNK_BYTES)
    memory.arena.fill_(1)
    weights = WeightRange(memory, num_bytes)
    row: dict[str, Any] = {"benchmark": "memory_mapping", "mib": num_bytes >> 20}
    for name, chunks in (("ordered", list(range(num))), ("scattered", np.random.default_rng(2).permutation(num).tolist())):
        times: list[tuple[float, float]] = []
        for _ in range(5):
            begin_s = time.perf_counter()
            weights.map(chunks)
            mapped_s = time.perf_counter()
            weights.tensor(0, (num_bytes,), torch.uint8)[:: mappings.HUGE_PAGE_BYTES].sum()
            touched_s = time.perf_counter()
            weights.unmap()
            times.append((mapped_s - begin_s, time.perf_counter() - touched_s))
        row[f"{name}_map_ms"] = round(1e3 * statistics.median(t[0] for t in times), 2)
        row[f"{name}_unmap_ms"] = round(1e3 * statistics.median(t[1] for t in times), 2)
    return [row]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.memory", description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="memory of each kind")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="layouts,swap,mapping")
    options = parser.parse_args()
    only, num_bytes = options.only.split(","), options.mib << 20
    ops.prepare("bfloat16", num_cores())
    ops.set_num_threads(num_cores())
    parts = {
        "layouts": lambda: layouts(num_bytes, options.rounds),
        "swap": lambda: swap_in(num_bytes, options.rounds),
        "mapping": lambda: mapping(num_bytes),
        "returning": returning.run,  # a daemon and a checkpoint of 2.2 GB: only when asked for
    }
    for name in only:
        for row in parts[name]():
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
