"""Measures what products with quantised weights take beside those with bfloat16 ones of the same shape: int8 with a scale an
output, FP8 with a scale an output and with a scale a block of 128 x 128, INT4 with a scale for each 128 inputs of an output, with
zero points and without, and with one for each 32, NVFP4.

Matrices lie in huge pages, as in an engine, several of each so that no cache holds them. The formats take turns, and each call is
timed, with one thread by the processor's time for it; a figure is the median of the fastest quarter, so that other processes
disturb it less. `faster`: the time with bfloat16 weights over that of the format. Kernels are compiled once, into .cache.

usage: python -m benchmarks.formats [--model 8b|one-b] [--threads N] [--rows 1,256]: one JSON line and a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine.host.process import num_cores, prepare_process

prepare_process()  # before torch is imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.huge_pages import placed  # noqa: E402
from benchmarks.run import machine, table  # noqa: E402
from benchmarks.server import ROOT  # noqa: E402
from engine.cpu.ops import CpuOps  # noqa: E402
from engine.ops.ops import Fp8Matrix, Int4Matrix, Int8Matrix, Matrix, Nvfp4Matrix  # noqa: E402

# outputs and inputs of products, by model
SHAPES = {"8b": ((4096, 4096), (14336, 4096)), "one-b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))}
BLOCK = 128
INT4_GROUPS = (128, 32)
COLD_BYTES = 400 << 20  # of one format's matrices at least
FEW_ROWS, FEW_ROWS_CALLS, CALLS = 16, 120, 20

ops = CpuOps(str(ROOT / ".cache"))


def _codes(num_outputs: int, num_inputs: int) -> Tensor:
    codes = placed(num_outputs, num_inputs, dtype=torch.uint8)
    drawn = torch.randint(0, 256, (num_outputs, num_inputs), dtype=torch.uint8)
    return codes.copy_(drawn.masked_fill_((drawn & 0x7F) == 0x7F, 0))


def _matrices(num_outputs: int, num_inputs: int) -> dict[str, list[Matrix]]:
    size = num_outputs * num_inputs
    codes = [_codes(num_outputs, num_inputs) for _ in range(-(-COLD_BYTES // size))]
    plain = [placed(num_outputs, num_inputs, dtype=torch.bfloat16) for _ in range(-(-COLD_BYTES // (2 * size)))]
    for one in plain:
        one.copy_(torch.rand(num_outputs, num_inputs) - 0.5)
    packed = [one.view(-1)[: size // 2].view(num_outputs, num_inputs // 2) for one in codes]
    one_each, of_blocks = torch.full((num_outputs, 1), 0.01), torch.full((num_outputs, -(-num_inputs // BLOCK)), 0.01)
    found: dict[str, list[Matrix]] = {
        "bfloat16": list(plain),
        "int8": [Int8Matrix(one.view(torch.int8), one_each.view(-1)) for one in codes],
        "fp8 by output": [Fp8Matrix(one, one_each, num_inputs) for one in codes],
        "fp8 by block": [Fp8Matrix(one, of_blocks, BLOCK) for one in codes],
    }
    for group in INT4_GROUPS:
        scales = [torch.full((num_outputs, num_inputs // group), 0.01).bfloat16() for _ in packed]
        found[f"int4 by {group}"] = [Int4Matrix(one, own, group) for one, own in zip(packed, scales, strict=True)]
        if group == BLOCK:
            zeros = [torch.randint(0, 17, own.shape, dtype=torch.uint8) for own in scales]
            matrices = zip(packed, scales, zeros, strict=True)
            found[f"int4 by {group}, zero points"] = [Int4Matrix(one, own, group, zero) for one, own, zero in matrices]
    of_groups = [torch.randint(0x30, 0x40, (num_outputs, num_inputs // 16), dtype=torch.uint8) for _ in packed]
    found["nvfp4"] = [Nvfp4Matrix(one, own, one_each.view(-1)) for one, own in zip(packed, of_groups, strict=True)]
    return found


def seconds(calls: dict[str, Sequence[Callable[[], Any]]], num_calls: int, clock: Callable[[], float]) -> dict[str, float]:
    """Returns the time of a call of each name: names take turns, and so do the calls of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(num_calls):
        for number, (name, own) in enumerate(calls.items()):
            call = own[(turn + number * len(own) // len(calls)) % len(own)]  # formats may have the same memory: not at once
            begin = clock()
            call()
            times[name].append(clock() - begin)
    return {name: statistics.median(sorted(own)[: len(own) // 4]) for name, own in times.items()}


def measure(shape: tuple[int, int], rows: Sequence[int], clock: Callable[[], float]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    matrices = _matrices(*shape)
    for num_rows in rows:
        x = (torch.rand(num_rows, shape[1]) - 0.5).bfloat16()
        calls: dict[str, Sequence[Callable[[], Any]]] = {}
        for name, own in matrices.items():
            calls[name] = [partial(ops.linear, x, one) for one in own]
        took = seconds(calls, FEW_ROWS_CALLS if num_rows <= FEW_ROWS else CALLS, clock)
        for name, own_s in took.items():
            about = {"outputs": shape[0], "inputs": shape[1], "rows": num_rows, "weights": name}
            found.append(about | {"ms": round(own_s * 1e3, 2), "faster": round(took["bfloat16"] / own_s, 2)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--rows", default="1,4,16,256")
    parser.add_argument("--model", choices=SHAPES, default="8b")
    options = parser.parse_args()
    torch.manual_seed(1)
    for quantize in ("int8", "fp8", "int4", "int4_zeros", "nvfp4"):
        ops.prepare("bfloat16", options.threads, quantize)
    ops.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    rows = [int(one) for one in options.rows.split(",")]
    products = [one for shape in SHAPES[options.model] for one in measure(shape, rows, clock)]
    about = {
        "benchmark": "formats",
        "model": options.model,
        "threads": options.threads,
        "clock": "cpu" if options.threads == 1 else "wall",
    }
    print(json.dumps(about | {"products": products} | machine()))
    print(table(products, {key: key for key in products[0]}))


if __name__ == "__main__":
    main()
