"""A Llama-3.1-8B-shaped model (and a 1B) on the GPU with nothing around it: decode against the floor by the read
bandwidth, prefill against the matrix rate, graphs, what a step costs the host, and an eviction with its reload. One JSON line
each, the most wanted first.

usage: python -m benchmarks.gpu_forward [--model 8b] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from benchmarks.gpu_limits import (
    copy_bytes_per_s,
    driver_bytes,
    gemm_flops,
    give_back,
    host_to_device_bytes_per_s,
    read_bytes_per_s,
)
from benchmarks.gpu_pipeline import pipelined
from benchmarks.gpu_shapes import Bench
from engine.cuda.work_space import KEPT_BYTES
from loader.shapes import dtypes, kv_layout
from loader.sizes.gpu_sizing import gpu_work_space_bytes
from scheduler.batch.plan import BatchPlan

ROWS = (1, 64, 8, 128, 256)  # the most wanted first
LENGTH = 2304  # tokens of a sequence


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_forward"} | figures), flush=True)


def decode(bench: Bench, num_rows: int, context: int, steps: int, read: float) -> None:
    def plan(number: int) -> BatchPlan:
        return bench.plan(num_rows, context + number, 1, known=False)

    pipelined(bench, plan, 1)  # has libraries load what the step needs; the next one is captured
    before = driver_bytes(bench.device)
    pipelined(bench, plan, 3)
    driver_mib = (driver_bytes(bench.device) - before) / 2**20
    wall_s, device_s, host_s = pipelined(bench, plan, steps)
    weights = bench.weights.num_bytes - bench.shape.vocab_size * bench.shape.hidden_size * dtypes.ITEM_BYTES[bench.dtype]
    kv = num_rows * (context + steps // 2) * kv_layout.kv_bytes_per_token(bench.shape, bench.dtype)
    floor_s = (weights + kv) / read
    graph = bench.model.graphs.captured.get(bench.model.graphs.rows_for(num_rows))
    tell(
        what="decode",
        model=bench.name,
        rows=num_rows,
        context=context,
        ms_per_token=round(wall_s * 1e3, 3),
        device_ms=round(device_s * 1e3, 3),
        floor_ms=round(floor_s * 1e3, 3),
        of_floor=round(floor_s / wall_s, 3),
        tokens_per_s=round(num_rows / wall_s, 1),
        launch_host_us=round(host_s * 1e6, 1),
        graph=graph is not None,
        capture_ms=None if graph is None else round(graph.capture_s * 1e3, 1),
        graph_mib=None if graph is None else round(graph.num_bytes / 2**20, 2),
        driver_mib=None if graph is None else round(driver_mib, 2),
    )


def prefill(bench: Bench, num_tokens: int, gemm: float) -> None:
    shape = bench.shape
    bench.model.execute(bench.plan(1, 0, num_tokens), bench.table)
    times = []
    for _ in range(5):
        began_s = time.perf_counter()
        bench.model.execute(bench.plan(1, 0, num_tokens), bench.table)
        times.append(time.perf_counter() - began_s)
    seconds = sorted(times)[len(times) // 2]
    matrices = bench.weights.num_bytes // dtypes.ITEM_BYTES[bench.dtype] - 2 * shape.vocab_size * shape.hidden_size
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens * (num_tokens + 1) / 2
    flops = 2.0 * matrices * num_tokens + 2.0 * shape.vocab_size * shape.hidden_size + attention
    tell(
        what="prefill",
        model=bench.name,
        tokens=num_tokens,
        ms=round(seconds * 1e3, 2),
        tflops=round(flops / seconds / 1e12, 1),
        of_gemm=round(flops / seconds / gemm, 3),
        tokens_per_s=round(num_tokens / seconds),
    )


def swap(bench: Bench, rate: float) -> None:
    """Weights go to page-locked memory and come back to the same addresses: what was captured still runs, with the same result."""
    if bench.weights.memory.device.type == "cuda":
        host = torch.empty_like(bench.weights.memory, device="cpu", pin_memory=True)
    else:
        host = torch.empty_like(bench.weights.memory)
    host.copy_(bench.weights.memory)
    graphs = len(bench.model.graphs.captured)
    before = bench.model.execute(bench.plan(1, 8, 1), bench.table).ids.tolist()
    bench.weights.memory.zero_()
    synchronise(bench)
    began_s = time.perf_counter()
    bench.weights.memory.copy_(host, non_blocking=True)
    synchronise(bench)
    seconds = time.perf_counter() - began_s
    after = bench.model.execute(bench.plan(1, 8, 1), bench.table).ids.tolist()
    tell(
        what="reload",
        model=bench.name,
        gib=round(len(host) / 2**30, 3),
        seconds=round(seconds, 4),
        of_bus=round(len(host) / seconds / rate, 3),
        same_token=before == after,
        captures_after=len(bench.model.graphs.captured) - graphs,
    )


def work_space(bench: Bench, num_tokens: int) -> None:
    """Compares the memory that steps took besides weights and KV with what loader/sizes/gpu_sizing.py keeps for them, and the
    memory that torch's allocator held, graphs and tables included, with what an engine lets it have."""
    kept = gpu_work_space_bytes(bench.shape, bench.dtype, num_tokens, 256)
    held = bench.weights.num_bytes + bench.num_blocks * bench.block_bytes
    taken, pools = torch.cuda.max_memory_allocated() - held, pools_mib()
    tell(
        what="work_space",
        model=bench.name,
        taken_mib=round(taken / 2**20),
        of_kept=round(taken / kept, 3),
        kept_mib=round(kept / 2**20),
        reserved_mib=round((torch.cuda.max_memory_reserved() - held) / 2**20),
        pools_mib=pools,
        pool_of_kept=round(pools["graphs"] / (KEPT_BYTES >> 20), 3),
        limit_mib=round((kept + KEPT_BYTES) / 2**20),
    )


def pools_mib() -> dict[str, int]:
    """Returns what torch holds of the device in the graphs' pools and outside them, weights and KV included."""
    sizes = {"graphs": 0, "others": 0}
    for segment in torch.cuda.memory_snapshot():
        sizes["others" if tuple(segment["segment_pool_id"]) == (0, 0) else "graphs"] += segment["total_size"] >> 20
    return sizes


def synchronise(bench: Bench) -> None:
    if bench.weights.memory.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_forward", description=__doc__)
    parser.add_argument("--model", default="8b", choices=("8b", "1b"))
    parser.add_argument("--tiny", action="store_true", help="interpreted on the CPU, at a size that only shows that this runs")
    options = parser.parse_args()
    device, tiny = ("cpu", True) if options.tiny else ("cuda", False)
    model = "tiny" if tiny else options.model
    copy, read = copy_bytes_per_s(device, tiny), read_bytes_per_s(device, tiny)
    gemm, bus = gemm_flops(device, tiny), host_to_device_bytes_per_s(device, tiny)
    give_back(device)  # of what measuring the limits took
    rates = {"copy_gb_s": copy, "read_gb_s": read, "bus_gb_s": bus}
    tell(what="limits", gemm_tflops=round(gemm / 1e12, 1), **{name: round(rate / 1e9, 1) for name, rate in rates.items()})
    began_s = time.perf_counter()
    bench = Bench(model, device, 4 if tiny else max(ROWS), 64 if tiny else LENGTH, 0 if tiny else 256)
    tell(
        what="start",
        model=model,
        weights_gib=round(bench.weights.num_bytes / 2**30, 2),
        kv_gib=round(bench.num_blocks * bench.block_bytes / 2**30, 2),
        warm_s=round(bench.warm_s, 2),
        make_s=round(time.perf_counter() - began_s, 2),
    )
    if tiny:
        decode(bench, 1, 20, 3, read)
        decode(bench, 3, 20, 3, read)
        prefill(bench, 40, gemm)
        swap(bench, bus)
        return
    torch.cuda.reset_peak_memory_stats()
    for num_rows in ROWS:
        decode(bench, num_rows, 1024, 100, read)
    prefill(bench, 2048, gemm)
    work_space(bench, 2048)
    swap(bench, bus)
    weights = bench.weights
    del bench
    give_back(device)
    long = Bench(model, device, 4, 8704, 8, weights)
    for num_tokens in (4096, 8192):
        prefill(long, num_tokens, gemm)
    decode(long, 1, 8192, 100, read)


if __name__ == "__main__":
    main()
