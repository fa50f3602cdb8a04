"""Runs Nsight Compute on the kernels that count: decode attention, prompt attention and sampling, at sizes of an 8B model. One JSON
line a launch. Where there is no ncu it says so and ends well.

usage: python -m benchmarks.gpu_ncu [--tiny]: the launches without ncu, interpreted on the CPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.gpu_watched import watched

KERNELS = "regex:_piece_kernel|_extend_kernel|_survey_kernel|_propose_kernel|_weigh_kernel|_choose_kernel"
METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "sm__inst_executed_pipe_tensor.sum": "tensor_instructions",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers",
    "launch__shared_mem_per_block": "shared_bytes",
    "lts__t_sector_hit_rate.pct": "l2_hit_percent",
}
LIMIT_S = 34.0


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_ncu"} | figures), flush=True)


def launches(tiny: bool) -> None:
    """Launches each kernel twice, the first time to compile it."""
    from benchmarks import gpu_kernels
    from benchmarks.gpu_limits import CACHE_DIR
    from engine.cuda.ops import CudaOps

    class Twice(gpu_kernels.Table):
        def __init__(self, device: str, tiny: bool) -> None:
            self.device, self.tiny = device, tiny

        def tell(self, line: dict[str, Any]) -> None:
            """Does nothing: ncu measures."""

        def bytes(self, name: str, case: str, num_bytes: int, call: Callable[[], Any], reads: bool = False) -> float:
            call(), call()
            return 0.0

        def flops(self, name: str, case: str, num_flops: float, call: Callable[[], Any]) -> None:
            call(), call()

    CudaOps(CACHE_DIR)  # has Triton keep compiled kernels there
    table = Twice("cpu" if tiny else "cuda", tiny)
    if tiny:
        gpu_kernels.decode(table, 2, 20, 4, 2, 16)
        return
    gpu_kernels.decode(table, 64, 4096, 32, 8, 128)
    gpu_kernels.extend(table, 2048, 0, 32, 8, 128)
    gpu_kernels.sampling(table, 64, 128256)


def read(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Returns one line a launch from ncu's CSV: its kernel, grid and metrics under our names."""
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = METRICS.get(row["Metric Name"])
        if name is None:
            continue
        line = found.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0], "grid": row.get("Grid Size", "")})
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # not there on this device
            continue
        scale = {"ns": 1e-3, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6} if name == "us" else {}
        line[name] = round(value * scale.get(row["Metric Unit"], 1.0), 2)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_ncu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--launches", action="store_true", help="only launch the kernels: what ncu watches")
    options = parser.parse_args()
    if options.tiny or options.launches:
        launches(options.tiny)
        if options.tiny:
            tell(what="launches, interpreted")
        return
    program = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if not os.access(program, os.X_OK):
        tell(what="none", skipped="there is no ncu on this machine")
        return
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "ncu.csv"
        command = [program, "--csv", "--log-file", str(log), "--metrics", ",".join(METRICS), "--kernel-name", KERNELS]
        command += ["--clock-control", "none", "--target-processes", "all"]
        command += [sys.executable, "-m", "benchmarks.gpu_ncu", "--launches"]
        written, code = watched(command, LIMIT_S)
        text = log.read_text(errors="replace") if log.exists() else ""
        for line in read(text.splitlines()):
            tell(what="launch", **line)
        if code != 0:
            sys.exit(f"ncu: {'out of time' if code is None else f'exit {code}'}\n{text[-1000:]}\n{written[-1000:]}")


if __name__ == "__main__":
    main()
