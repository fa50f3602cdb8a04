"""Measures what LoRA adapters cost in a step, beside the same steps without any, in one run: the engine's model, driven by hand.

`python -m benchmarks.adapters --model DIR [--rows N] [--rank N] [--context N] [--prompt N] [--rounds N] [--dtype D] [--threads N]`
prints a table to standard error, and one JSON line: for each kind of step the milliseconds of its fastest, of wall time and of CPU
time of all threads, and the base's rate that it has. Kinds take turns, step by step, so that all of them see the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine.host.process import prepare_process

prepare_process()  # before torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.forward import CHUNK_BYTES, MAX_BATCHED_TOKENS, load_model, make_table, step  # noqa: E402
from engine.cpu.model import CpuModel  # noqa: E402
from engine.host.processor import this_processor  # noqa: E402
from loader.adapters.layout import ALIGN_BYTES, AdapterLayout, AdapterPlace  # noqa: E402
from loader.configs.adapter_matrices import adapted_matrices  # noqa: E402
from loader.configs.kernel_sets import ADAPTERS  # noqa: E402
from loader.models.catalog import scan_one  # noqa: E402
from loader.shapes.dtypes import ITEM_BYTES  # noqa: E402
from loader.shapes.model_shape import ModelShape  # noqa: E402

Step = Callable[[], None]


def whole_layout(shape: ModelShape, rank: int, item_bytes: int) -> AdapterLayout:
    """An adapter of all matrices that adapters may change."""
    places, offset, line = [], 0, ALIGN_BYTES // item_bytes
    for number, matrix in enumerate(adapted_matrices(shape)):
        place = AdapterPlace(number, rank, offset, matrix.inputs, matrix.outputs, (None,) * len(matrix.names))
        places.append(place)
        offset += -(-place.num_elements // line) * line
    return AdapterLayout(tuple(places), offset * item_bytes)


def place_adapters(model: CpuModel, layout: AdapterLayout, first_chunk: int, num_adapters: int) -> None:
    """Sets adapters of random numbers from a chunk of the arena on."""
    chunks = -(-layout.num_bytes // CHUNK_BYTES)
    for number in range(num_adapters):
        begin = (first_chunk + number * chunks) * CHUNK_BYTES
        held = model.arena[begin : begin + layout.num_bytes].view(getattr(torch, model.dtype))
        held.normal_(0, 0.01, generator=torch.Generator().manual_seed(number))
        model.adapter_memory.set(number, begin, layout)


def take_turns(kinds: dict[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each kind's fastest and median step. The first two rounds are not counted: they record."""
    wall: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 2):
        for kind, run in kinds.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            run()
            if number >= 2:
                wall[kind].append((time.perf_counter() - wall_s) * 1e3)
                cpu[kind].append((time.process_time() - cpu_s) * 1e3)
    return {
        kind: {"best_ms": min(wall[kind]), "median_ms": statistics.median(wall[kind]), "cpu_ms": min(cpu[kind])} for kind in kinds
    }


def measure(
    path: Path, dtype: str, num_rows: int, rank: int, context: int, prompt: int, rounds: int, threads: int
) -> dict[str, object]:
    shape = scan_one(path).shape
    assert shape is not None
    dtype = shape.dtype if dtype == "auto" else dtype
    layout = whole_layout(shape, rank, ITEM_BYTES[dtype])
    spare = num_rows * -(-layout.num_bytes // CHUNK_BYTES)
    length = max(context + 8, prompt)
    base, _, _ = load_model(path, dtype, num_rows, length, threads)
    model, _, _ = load_model(path, dtype, num_rows, length, threads, spare_chunks=spare)
    kernels_s = time.perf_counter()
    model._ops.prepare(dtype, model.num_threads, ADAPTERS)
    kernels_s = time.perf_counter() - kernels_s
    kv_chunks = (len(model.arena) - model.weights_bytes) // CHUNK_BYTES - spare
    place_adapters(model, layout, kv_chunks, num_rows)
    table = make_table(num_rows, length, shape.vocab_size)

    def decode(of: CpuModel, rows: int, numbers: list[int]) -> Step:
        slots, adapters = np.arange(rows, dtype=np.int32), np.array(numbers, np.int32)

        def run() -> None:
            table.adapter[:rows] = adapters
            step(of, table, slots, context, 1)

        return run

    def prefill(of: CpuModel, number: int) -> Step:
        slots = np.zeros(1, np.int32)

        def run() -> None:
            table.adapter[0] = number
            step(of, table, slots, 0, prompt)

        return run

    none, each = [-1] * num_rows, list(range(num_rows))
    groups = {
        f"{num_rows} rows": {
            "base": decode(base, num_rows, none),
            "no row has one": decode(model, num_rows, none),
            "one for each row": decode(model, num_rows, each),
            "one for all rows": decode(model, num_rows, [0] * num_rows),
            "half of the rows": decode(model, num_rows, [number if number % 2 else -1 for number in each]),
        },
        "1 row": {
            "base": decode(base, 1, [-1]),
            "no row has one": decode(model, 1, [-1]),
            "one for each row": decode(model, 1, [0]),
        },
        f"prompt of {prompt}": {
            "base": prefill(base, -1),
            "no row has one": prefill(model, -1),
            "one for each row": prefill(model, 0),
        },
    }
    found: dict[str, dict[str, dict[str, float]]] = {}
    for group, kinds in groups.items():
        times = take_turns(kinds, rounds)
        for kind, own in times.items():
            own["rate"] = times["base"]["best_ms"] / own["best_ms"]
            own["median_rate"] = times["base"]["median_ms"] / own["median_ms"]
            spent = f"{own['best_ms']:8.2f} ms {own['cpu_ms']:8.2f} ms of CPU"
            print(f"{group:<14} {kind:<18} {spent}  {own['rate']:.3f} of the base's rate", file=sys.stderr)
        found[group] = {kind: {name: round(value, 3) for name, value in own.items()} for kind, own in times.items()}
    return {
        "benchmark": "adapters",
        "model": path.name,
        "dtype": dtype,
        "rank": rank,
        "adapter_bytes": layout.num_bytes,
        "context": context,
        "threads": model.num_threads,
        "kernels_s": round(kernels_s, 1),
        "cpu_features": sorted(this_processor().features),
        "steps": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=MAX_BATCHED_TOKENS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    options = parser.parse_args()
    sizes = (options.rows, options.rank, options.context, options.prompt, options.rounds, options.threads)
    print(json.dumps(measure(options.model, options.dtype, *sizes)))


if __name__ == "__main__":
    main()
