"""Runs one shape of each Triton kernel on the GPU and compares it with its twin: short enough for a sanitizer to watch.

usage: python -m tests.gpu.one_shape [--tiny] [CASE …]: --tiny interpreted on the CPU."""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.gpu_limits import CACHE_DIR
from engine.cuda.ops import CudaOps
from loader.shapes.kv_dtypes import FP8_CAPABILITY
from tests.engine.kernels.draw import Draw
from tests.engine.kernels.kernel_cases import CASES, ONE_DTYPE

SEED = 3


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.gpu.one_shape", description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    options = parser.parse_args()
    device, dtype = ("cpu", torch.float32) if options.tiny else ("cuda", torch.bfloat16)
    CudaOps(CACHE_DIR)  # has Triton keep compiled kernels there
    for name in options.cases or CASES:
        if name.endswith("fp8") and not options.tiny and torch.cuda.get_device_capability() < FP8_CAPABILITY:
            continue
        began_s = time.perf_counter()
        CASES[name](Draw(SEED, torch.float32 if name in ONE_DTYPE else dtype, device))
        print(f"{name}: {time.perf_counter() - began_s:.2f} s", flush=True)


if __name__ == "__main__":
    main()
