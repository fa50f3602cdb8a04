"""Steps that decode 64 rows and compute a piece of a prompt beside them, which are most steps under load: as the engine runs them,
which is as a graph where there is one that gains anything, and with each kernel launched by the host. For an 8B and a 1B model: the
step's time by the clock, that in which the device executes something (by torch's profiler, in other steps), and the host's to
launch it. Where the host takes nearly all of the step, the device waits for it. One JSON line for each piece, one for each graph,
and one for what all graphs take.

usage: python -m benchmarks.gpu_mixed [--tiny]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.gpu_limits import driver_bytes, give_back
from benchmarks.gpu_pipeline import busy_s, pipelined
from benchmarks.gpu_shapes import Bench
from scheduler.batch.plan import BatchPlan

NUM_ROWS, CHUNKS, CONTEXT, STEPS, PROFILED_STEPS = 64, (64, 256, 512), 1024, 40, 10


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
    busy = busy_s(bench, with_chunk, min(steps, PROFILED_STEPS))
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
        first_to_last_ms=round(took.device * 1e3, 3),
        busy_ms=round(busy * 1e3, 3),
        launch_host_us=round(took.host * 1e6, 1),
        host_share=round(took.host / took.wall, 3),
        over_device=round(took.wall / busy, 3) if busy else None,
        graph_tokens=0 if size is None else size.num_tokens,
        eager_ms=round(eager.wall * 1e3, 3),
        eager_first_to_last_ms=round(eager.device * 1e3, 3),
        eager_launch_host_us=round(eager.host * 1e6, 1),
        over_eager=round(took.wall / eager.wall, 3),
        decode_alone_ms=round(alone.wall * 1e3, 3),
        over_decode_alone=round(took.wall / alone.wall, 2),
    )


def num_graphs(bench: Bench) -> int:
    return len(bench.model.graphs.captured) + len(bench.model.mixed_graphs.captured)


def capture(bench: Bench) -> None:
    """Captures what the engine would capture in idle time. What products and tiles that are compared before and after take of the
    device is not in what the graphs take."""
    took = list[int]()  # of the driver's memory, before the first graph and after each
    while bench.model.num_uncaptured:
        before, num_before = driver_bytes(bench.device), num_graphs(bench)
        bench.model.capture_next()
        if num_graphs(bench) > num_before:
            took += [driver_bytes(bench.device)] if took else [before, driver_bytes(bench.device)]
    driver_mib = (took[-1] - took[0]) / 2**20 if took else 0.0
    tell(
        what="graphs",
        model=bench.name,
        graphs=num_graphs(bench),
        driver_mib=round(driver_mib, 1),
        driver_mib_a_graph=round(driver_mib / num_graphs(bench), 2) if took else None,
    )
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
        bench = Bench("tiny", "cpu", 3, 64, 0)
        capture(bench)
        mixed(bench, 2, 20, 8, 2)
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
