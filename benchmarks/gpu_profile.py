"""Measures where the time of an 8B model's steps goes: kernels by their time on the device, of a decode step of 1 and of 64 rows
and of a prompt, and what of the step no kernel runs. One JSON line a kernel; torch's own tables go to the log.

usage: python -m benchmarks.gpu_profile [--tiny]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_pipeline import executed_us, profiling
from benchmarks.gpu_shapes import Bench

STEPS, MOST_KERNELS = 10, 12
NAME_CHARACTERS = 70


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_profile"} | figures), flush=True)


def profiled(step: str, device: str, steps: int, run: Callable[[int], Any]) -> None:
    """run: launches and ends step number n."""
    run(0)
    on_gpu = device == "cuda"
    began_s = time.perf_counter()
    for number in range(steps):
        run(1 + number)
    wall_us = (time.perf_counter() - began_s) / steps * 1e6  # without the profiler, which slows the host down
    with profiling(device) as profiler:
        for number in range(steps):
            run(1 + number)
        if on_gpu:
            torch.cuda.synchronize()
    averages = profiler.key_averages()
    sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels = sorted(((float(getattr(row, sort_by)), row.key, row.count) for row in averages), reverse=True)
    kernels = [kernel for kernel in kernels if kernel[0] > 0]
    busy_us = executed_us(profiler, device) / steps
    tell(
        what="step",
        step=step,
        ms=round(wall_us / 1e3, 3),
        kernels_ms=round(busy_us / 1e3, 3),
        no_kernel_share=round(max(0.0, 1 - busy_us / wall_us), 3),
        launches=round(sum(count for _, _, count in kernels) / steps),
    )
    for total_us, name, count in kernels[:MOST_KERNELS]:
        each = {"us": round(total_us / steps, 1), "share": round(total_us / steps / busy_us, 3), "calls": round(count / steps, 1)}
        tell(what="kernel", step=step, kernel=name[:NAME_CHARACTERS], **each)
    print(averages.table(sort_by=sort_by, row_limit=30, max_name_column_width=60), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_profile", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="interpreted on the CPU, at a size that only shows that this runs")
    tiny = parser.parse_args().tiny
    device, context, prompt = ("cpu", 20, 16) if tiny else ("cuda", 1024, 2048)
    bench = Bench("tiny", device, 2, 64, 0) if tiny else Bench("8b", device, 64, 2304, 64)
    for num_rows in (1, 2) if tiny else (1, 64):

        def decode(number: int, num_rows: int = num_rows) -> None:
            bench.model.execute(bench.plan(num_rows, context + number, 1, known=False), bench.table)

        profiled(f"decode of {num_rows} rows", device, 2 if tiny else STEPS, decode)
    bench.table.num_tokens[:] = 0
    profiled(
        f"prompt of {prompt} tokens",
        device,
        1 if tiny else 3,
        lambda number: bench.model.execute(bench.plan(1, 0, prompt), bench.table),
    )


if __name__ == "__main__":
    main()
