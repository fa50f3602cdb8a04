"""Steps that decode 64 rows and compute a piece of a prompt beside them, which are most steps under load. Where no graph holds
them, the host launches each kernel. For an 8B and a 1B model: the step's time by the clock, and the host's to launch it. Where the
host takes nearly all of the step, the device waits for it. One JSON line each.

usage: python -m benchmarks.gpu_mixed [--tiny]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.gpu_limits import give_back
from benchmarks.gpu_pipeline import pipelined
from benchmarks.gpu_shapes import Bench
from scheduler.batch.plan import BatchPlan

NUM_ROWS, CHUNKS, CONTEXT, STEPS = 64, (64, 256, 512), 1024, 40


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_mixed"} | figures), flush=True)


def mixed(bench: Bench, num_rows: int, context: int, chunk: int, steps: int) -> None:
    def decode(at: int) -> BatchPlan:
        return bench.plan(num_rows, context + at, 1, known=False)

    def with_chunk(at: int) -> BatchPlan:
        return bench.mixed_plan(num_rows, context + at, chunk)

    for plan in (decode, with_chunk):
        pipelined(bench, plan, 3)
    alone, took = pipelined(bench, decode, steps), pipelined(bench, with_chunk, steps)
    tell(
        model=bench.name,
        rows=num_rows,
        chunk=chunk,
        context=context,
        ms=round(took.wall * 1e3, 3),
        device_ms=round(took.device * 1e3, 3),
        launch_host_us=round(took.host * 1e6, 1),
        host_share=round(took.host / took.wall, 3),
        decode_alone_ms=round(alone.wall * 1e3, 3),
        over_decode_alone=round(took.wall / alone.wall, 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_mixed", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="interpreted on the CPU, at a size that only shows that this runs")
    if parser.parse_args().tiny:
        mixed(Bench("tiny", "cpu", 3, 64, 0), 2, 20, 8, 2)
        return
    for name in ("8b", "1b"):
        bench = Bench(name, "cuda", NUM_ROWS + 1, CONTEXT + STEPS + max(CHUNKS) + 8, NUM_ROWS)
        for chunk in CHUNKS:
            mixed(bench, NUM_ROWS, CONTEXT, chunk, STEPS)
        del bench
        give_back("cuda")


if __name__ == "__main__":
    main()
