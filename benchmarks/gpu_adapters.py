"""Steps whose rows have LoRA adapters against the same steps without, of a Llama-3.1-8B-shaped model on the GPU with 32 adapters of
rank 16 that change every matrix of attention and of the MLPs: 32 rows of as many adapters and of one, one row, and prompts of one
adapter. One JSON line each, and one for each graph that steps with adapters have besides.

usage: python -m benchmarks.gpu_adapters [--tiny]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu_limits import give_back
from benchmarks.gpu_pipeline import StepSeconds, pipelined
from benchmarks.gpu_shapes import BLOCK_TOKENS, Bench, shape_of
from loader.adapters.layout import ALIGN_BYTES, AdapterLayout, AdapterPlace
from loader.configs.adapter_matrices import adapted_matrices
from loader.shapes import kv_layout
from loader.shapes.dtypes import ITEM_BYTES
from loader.shapes.model_shape import ModelShape

NUM_ROWS, NUM_ADAPTERS, RANK, CONTEXT, STEPS = 32, 32, 16, 1024, 40
PROMPTS = (512, 2048)


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_adapters"} | figures), flush=True)


def layout_of(shape: ModelShape, rank: int, item_bytes: int) -> AdapterLayout:
    """Returns where everything of an adapter lies that changes all matrices."""
    places, offset = [], 0
    for number, matrix in enumerate(adapted_matrices(shape)):
        place = AdapterPlace(number, rank, offset, matrix.inputs, matrix.outputs, (None,) * len(matrix.outputs))
        places.append(place)
        offset += -(-place.num_elements * item_bytes // ALIGN_BYTES) * ALIGN_BYTES // item_bytes
    return AdapterLayout(tuple(places), offset * item_bytes)


def bench_with_adapters(name: str, device: str, num_rows: int, length: int, num_adapters: int, rank: int) -> Bench:
    """Returns a model whose arena holds adapters of small random numbers behind the blocks of its sequences. The last sequence is
    for prompts."""
    shape, dtype = shape_of(name), "bfloat16" if device == "cuda" else "float32"
    block_bytes = kv_layout.block_bytes(shape, dtype, BLOCK_TOKENS)
    layout = layout_of(shape, rank, ITEM_BYTES[dtype])
    first, each = (num_rows + 1) * -(-length // BLOCK_TOKENS), -(-layout.num_bytes // block_bytes)
    wanted = first + num_adapters * each
    bench = Bench(name, device, num_rows + 1, length, num_rows if device == "cuda" else 0, num_blocks=wanted)
    if bench.num_blocks < wanted:
        raise MemoryError(f"there is room for {bench.num_blocks} blocks, and {wanted} are needed")
    bench.model._memory[0].kv[first:].normal_(0.0, 0.02)
    bench.num_blocks = first
    bench.table = bench.new_table(num_rows + 1, length)
    for number in range(num_adapters):
        bench.model.adapter_memory.set(number, (first + number * each) * block_bytes, layout)
    return bench


def compare(bench: Bench, num_adapters: int, context: int, steps: int, prompts: tuple[int, ...]) -> None:
    num_rows, table = len(bench.table.request_id) - 1, bench.table

    def decode(rows: int, adapters: int) -> StepSeconds:
        """Measures steps of so many rows that decode, of which each has another one of so many adapters, in turn."""
        table.adapter[:] = np.arange(len(table.adapter)) % adapters if adapters else -1
        return pipelined(bench, lambda at: bench.plan(rows, context + at, 1, known=False), steps)

    def prompt(num_tokens: int, adapters: int) -> StepSeconds:
        table.adapter[:] = 0 if adapters else -1
        return pipelined(bench, lambda at: bench.plan(1, 0, num_tokens), max(2, steps // 8))

    cases: list[tuple[str, Callable[[int], StepSeconds], tuple[int, ...]]] = [
        (f"{num_rows} rows", lambda adapters: decode(num_rows, adapters), (num_adapters, 1)),
        ("1 row", lambda adapters: decode(1, adapters), (1,)),
        *((f"prompt of {num}", partial(prompt, num), (1,)) for num in prompts),
    ]
    for case, run, numbers in cases:
        for adapters in (0, *numbers):
            run(adapters)  # graphs are captured, kernels brought to the device
            capture_prompts(bench, prompts, adapters > 0)
        for adapters in numbers:
            without, took, again = run(0), run(adapters), run(0)
            base = StepSeconds(*(min(pair) for pair in zip(without, again, strict=True)))
            tell(
                what="step",
                model=bench.name,
                case=case,
                adapters=adapters,
                ms=round(took.wall * 1e3, 3),
                device_ms=round(took.device * 1e3, 3),
                launch_host_us=round(took.host * 1e6, 1),
                base_ms=round(base.wall * 1e3, 3),
                of_base=round(base.wall / took.wall, 3),  # of its rate
            )
    for rows, graph in bench.model.adapted_graphs.captured.items():
        tell(what="graph", rows=rows, capture_ms=round(graph.capture_s * 1e3, 1), graph_mib=round(graph.num_bytes / 2**20, 2))


def capture_prompts(bench: Bench, prompts: Sequence[int], adapted: bool) -> None:
    """Captures the graphs of prompts that the engine would capture in idle time, once each kernel of theirs was launched."""
    graphs = bench.model.adapted_mixed_graphs if adapted else bench.model.mixed_graphs
    for num_tokens in prompts:
        num_tiles = -(-num_tokens // bench.model.tile_tokens)
        size = next((size for size in graphs.missing() if size.holds(num_tokens, 1, num_tiles)), None)
        if size is not None and graphs.size_for(num_tokens, 1, num_tiles) is None:
            bench.model.capture_mixed(size, adapted)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_adapters", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="interpreted on the CPU, at a size that only shows that this runs")
    if parser.parse_args().tiny:
        compare(bench_with_adapters("tiny", "cpu", 3, 48, 2, 8), 2, 20, 2, (18,))
        return
    bench = bench_with_adapters("8b", "cuda", NUM_ROWS, CONTEXT + STEPS + max(PROMPTS), NUM_ADAPTERS, RANK)
    compare(bench, NUM_ADAPTERS, CONTEXT, STEPS, PROMPTS)
    del bench
    give_back("cuda")


if __name__ == "__main__":
    main()
