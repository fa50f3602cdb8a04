"""Measures how fast the cpu device multiplies rows with the experts of a layer whose weights are in MXFP4 or NVFP4, against the
same in bfloat16.

The matrices are those of gate and up in gpt-oss 20B (2880 inputs, 5760 outputs), of 16 experts, so that no cache holds them. Each
call multiplies the given number of rows with each of four experts, in turn with others of the 16. With one row, as a decode step of
one stream has it, memory is the limit. usage: python -m benchmarks.formats_experts [--threads N] [--rounds N] [--cpu-time]

--cpu-time: the clock of this process's CPU time instead of the wall's, for a machine that others use, with one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.run import machine
from engine.cpu import experts
from engine.cpu.ops import CpuOps
from engine.ops.ops import Mxfp4Matrix, Nvfp4Matrix

EXPERTS, CHOSEN, INPUTS, OUTPUTS = 16, 4, 2880, 5760
ROWS = (1, 2, 4, 8, 16, 64)


def routing(turn: int, rows: int) -> experts._Routing:
    """Returns where sorted rows go: so many to each of four experts, other ones in each turn."""
    counts = np.zeros(EXPERTS, np.int32)
    counts[(CHOSEN * turn + np.arange(CHOSEN)) % EXPERTS] = rows
    firsts = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
    return experts._Routing(torch.empty(0), None, None, firsts, None)


def seconds(ops: CpuOps, x: Tensor, weight: Tensor | Mxfp4Matrix | Nvfp4Matrix, rows: int, rounds: int, clock: Any) -> float:
    """Returns the median time of a call."""
    taken = []
    for turn in range(rounds + 2):
        where = routing(turn, rows)
        begin = clock()
        experts._grouped_product(ops.kernels, x, weight, None, where, rows)
        taken.append(clock() - begin)
    return statistics.median(taken[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.formats_experts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--cache-dir", default=str(Path.home() / ".cache" / "hearthd" / "kernels"))
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    ops = CpuOps(options.cache_dir)
    for quantize in ("mxfp4", "nvfp4"):
        ops.prepare("bfloat16", options.threads, quantize)
    ops.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(EXPERTS, OUTPUTS, INPUTS, generator=generator).to(torch.bfloat16)
    blocks = torch.randint(0, 256, (EXPERTS, OUTPUTS, INPUTS // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 124, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    codes = torch.randint(0x30, 0x40, (EXPERTS, OUTPUTS, INPUTS // 16), generator=generator, dtype=torch.uint8)
    in_mxfp4, in_nvfp4 = Mxfp4Matrix(blocks, scales), Nvfp4Matrix(blocks.flatten(2), codes, torch.ones(EXPERTS, OUTPUTS))
    told: dict[str, Any] = {
        "benchmark": "formats_experts",
        "threads": options.threads,
        "clock": "cpu" if options.cpu_time else "wall",
    }
    for rows in ROWS:
        x = torch.randn(CHOSEN * rows, INPUTS, generator=generator).to(torch.bfloat16)
        with torch.inference_mode():
            taken = [seconds(ops, x, weight, rows, options.rounds, clock) for weight in (plain, in_mxfp4, in_nvfp4) * 2]
        plain_s, mxfp4_s, nvfp4_s = (min(taken[at::3]) for at in range(3))
        told[f"rows_{rows}"] = {
            "bfloat16_ms": round(plain_s * 1e3, 3),
            "mxfp4_ms": round(mxfp4_s * 1e3, 3),
            "nvfp4_ms": round(nvfp4_s * 1e3, 3),
            "times_as_fast": round(plain_s / mxfp4_s, 2),
            "nvfp4_times_as_fast": round(plain_s / nvfp4_s, 2),
            "mxfp4_gb_s": round(CHOSEN * OUTPUTS * INPUTS * 17 / 32 / mxfp4_s / 1e9, 2),
            "nvfp4_gb_s": round(CHOSEN * OUTPUTS * INPUTS * 18 / 32 / nvfp4_s / 1e9, 2),
        }
    print(json.dumps(told | machine()), flush=True)


if __name__ == "__main__":
    main()
