"""Steps that decode 64 rows and compute a piece of a prompt beside them, which are most steps under load: as the engine runs them,
which is as a graph where there is one that gains anything, and with each kernel launched by the host. For an 8B and a 1B model: the
step's time by the clock, the device's, and the host's to launch it. Where the host takes nearly all of the step, the device waits
for it. One JSON line for each piece, and one for each graph.

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

    graphs = bench.model.mixed_graphs
    size = graphs.size_for(num_rows + chunk, num_rows + 1, -(-chunk // bench.model.tile_tokens))
    for plan in (decode, with_chunk):
        pipelined(bench, plan, 3)
    alone, took = pipelined(bench, decode, steps), pipelined(bench, with_chunk, steps)
    bench.model.mixed_graphs = graphs.none()
    pipelined(bench, with_chunk, 3)
    eager = pipelined(bench, with_chunk, steps)
    bench.model.mixed_graphs = graphs
    tell(
        what="step",
        model=bench.name,
        rows=num_rows,
        chunk=chunk,
        context=context,
        ms=round(took.wall * 1e3, 3),
        device_ms=round(took.device * 1e3, 3),
        launch_host_us=round(took.host * 1e6, 1),
        host_share=round(took.host / took.wall, 3),
        over_device=round(took.wall / took.device, 3),
        graph_tokens=0 if size is None else size.num_tokens,
        eager_ms=round(eager.wall * 1e3, 3),
        eager_device_ms=round(eager.device * 1e3, 3),
        eager_launch_host_us=round(eager.host * 1e6, 1),
        over_eager=round(took.wall / eager.wall, 3),
        decode_alone_ms=round(alone.wall * 1e3, 3),
        over_decode_alone=round(took.wall / alone.wall, 2),
    )


def capture(bench: Bench) -> None:
    """Captures what the engine would capture in idle time."""
    while bench.model.num_uncaptured:
        bench.model.capture_next()
    for size, graph in bench.model.mixed_graphs.captured.items():
        tell(
            what="graph",
            model=bench.name,
            tokens=size.num_tokens,
            rows=size.num_rows,
            capture_ms=round(graph.capture_s * 1e3, 1),
            graph_mib=round(graph.num_bytes / 2**20, 2),
            eager_launch_ms=round(graph.launch_s * 1e3, 3),
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_mixed", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="interpreted on the CPU, at a size that only shows that this runs")
    if parser.parse_args().tiny:
        mixed(Bench("tiny", "cpu", 3, 64, 0), 2, 20, 8, 2)
        return
    for name in ("8b", "1b"):
        bench = Bench(name, "cuda", NUM_ROWS + 1, CONTEXT + STEPS + max(CHUNKS) + 8, NUM_ROWS)
        capture(bench)
        for chunk in CHUNKS:
            mixed(bench, NUM_ROWS, CONTEXT, chunk, STEPS)
        del bench
        give_back("cuda")


if __name__ == "__main__":
    main()
