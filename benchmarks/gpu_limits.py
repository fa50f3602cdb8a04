"""The machine's own limits, measured in the run that is compared with them: a large copy, a large sum, a large
matrix product, the bus."""

from __future__ import annotations

import gc
import pathlib
import time
from collections.abc import Callable
from typing import Any

import torch

# As benchmarks/server.py's, so that kernels are compiled once.
CACHE_DIR = str(pathlib.Path(__file__).resolve().parent.parent / ".cache")


def seconds_of(call: Callable[[], Any], device: str, repeats: int = 20, warm_up: int = 3, captured: bool = True) -> float:
    """Returns the seconds of one call. On a GPU it is the median, by device events, of a few runs of a graph of `repeats` calls: a
    small kernel takes less time than its launch. captured False, for what no graph can hold: each call by itself."""
    for _ in range(warm_up):
        call()
    if device != "cuda":
        times = []
        for _ in range(repeats):
            began_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - began_s)
        return sorted(times)[len(times) // 2]
    torch.cuda.synchronize()
    run, num_calls, num_runs = call, 1, repeats
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        run, num_calls, num_runs = graph.replay, repeats, 5
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_runs)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) / 1e3 / num_calls for begin, end in events]
    return sorted(times)[len(times) // 2]


def give_back(device: str) -> None:
    """Has torch give unused memory back to the device, what only reference cycles hold included."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def driver_bytes(device: str) -> int:
    """Returns how many bytes of the device are taken by all but what torch's allocator holds: the context, loaded kernels, graphs,
    and other processes; 0 without a GPU."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def copy_bytes_per_s(device: str, tiny: bool) -> float:
    """Device to device; bytes read and bytes written both count."""
    source = torch.randint(0, 255, ((1 << 20) if tiny else (4 << 30),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / seconds_of(lambda: target.copy_(source), device, 10)


def read_bytes_per_s(device: str, tiny: bool) -> float:
    """Returns the rate of a sum over memory, which writes next to nothing. Steps that read weights and KV are held to it, since it
    is more than a copy moves."""
    source = torch.randint(0, 1 << 20, ((1 << 17) if tiny else (1 << 29),), device=device)
    return 8 * len(source) / seconds_of(source.sum, device, 10)


def gemm_flops(device: str, tiny: bool) -> float:
    """bfloat16 on random numbers; square, as large as fills the device."""
    n, dtype = (64, torch.float32) if tiny else (8192, torch.bfloat16)
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / seconds_of(lambda: left @ right, device, 20)


def host_to_device_bytes_per_s(device: str, tiny: bool) -> float:
    """Measures copies from host memory, page-locked where there is a GPU."""
    num_bytes = (1 << 20) if tiny else (1 << 30)
    source = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return num_bytes / seconds_of(lambda: target.copy_(source, non_blocking=True), device, 5, captured=False)
