"""Measures what a step costs with no server around it: the engine's own runner and model, driven by hand.

`python -m benchmarks.forward --model DIR [--rows N] [--context N] [--steps N] [--dtype D] [--threads N] [--prompt N]` prints one
JSON line: wall and CPU microseconds per token of decode steps over all threads, and of a prefill of `--prompt` tokens a row.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

from engine.host.process import prepare_process

prepare_process()  # before torch is imported

import numpy as np  # noqa: E402

from benchmarks.server import ROOT  # noqa: E402
from engine.contracts.loads import LoadTask  # noqa: E402
from engine.cpu.backend import CpuBackend  # noqa: E402
from engine.cpu.memory import CpuMemory  # noqa: E402
from engine.cpu.model import CpuModel  # noqa: E402
from engine.loading.runner import TorchRunner  # noqa: E402
from engine.protocol import MTP, Configure, LoadModel  # noqa: E402
from loader.formats.registry import FORMATS  # noqa: E402
from loader.models.catalog import scan_one  # noqa: E402
from loader.shapes import kv_layout  # noqa: E402
from loader.shapes.model_shape import ModelShape  # noqa: E402
from loader.sizes import layout  # noqa: E402
from scheduler.batch.plan import BatchPlan, SequenceTable  # noqa: E402

BLOCK_TOKENS = 16
CHUNK_BYTES = 2 << 20
MAX_BATCHED_TOKENS = 512


def make_table(num_rows: int, length: int, vocab_size: int) -> SequenceTable:
    """num_rows greedy sequences of random tokens whose blocks are scattered over the arena."""
    generator = np.random.default_rng(0)
    blocks = -(-length // BLOCK_TOKENS)
    ints = np.zeros(num_rows, np.int32)
    return SequenceTable(
        request_id=np.arange(1, num_rows + 1, dtype=np.int64),
        tokens=generator.integers(0, vocab_size, (num_rows, length)).astype(np.int32),
        num_tokens=ints.copy(),
        num_prompt=ints.copy(),
        num_computed=ints.copy(),
        block_tables=[generator.permutation(num_rows * blocks).astype(np.int32).reshape(num_rows, blocks)],
        temperature=np.zeros(num_rows, np.float32),
        top_p=np.ones(num_rows, np.float32),
        top_k=ints.copy(),
        seed=np.zeros(num_rows, np.uint64),
        num_logprobs=ints - 1,
        min_tokens_until=ints.copy(),
        max_total_tokens=ints + length,
        ignore_eos=np.zeros(num_rows, np.bool_),
        min_p=np.zeros(num_rows, np.float32),
        edits_logits=np.zeros(num_rows, np.bool_),
        prompt_logprobs=np.zeros(num_rows, np.bool_),
        num_prompt_logprobs=ints - 1,
        constrained=np.zeros(num_rows, np.bool_),
        limited=np.zeros(num_rows, np.bool_),
        params=[None] * num_rows,
        adapter=ints - 1,
    )


def step(model: CpuModel, table: SequenceTable, slots: np.ndarray, start: int, num_new: int) -> np.ndarray:
    """All slots run num_new tokens from position start on."""
    rows = len(slots)
    plan = BatchPlan(
        step_id=0,
        model=model.name,
        slots=slots,
        num_computed=np.full(rows, start, np.int32),
        num_new=np.full(rows, num_new, np.int32),
        samples=np.ones(rows, np.bool_),
    )
    return model.execute(plan, table).ids


class Clock:
    """Wall and CPU time (user and system, all threads) since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def us_per(self, tokens: int) -> tuple[float, float]:
        return (
            round((time.perf_counter() - self._wall) / tokens * 1e6, 2),
            round((time.process_time() - self._cpu) / tokens * 1e6, 2),
        )


def load_model(
    path: Path,
    dtype: str,
    num_rows: int,
    length: int,
    threads: int = 0,
    quantize: str = "",
    kv_cache_dtype: str = "",
    spare_chunks: int = 0,
    speculator: str = "none",
) -> tuple[CpuModel, ModelShape, float]:
    """The model, with KV for num_rows sequences of `length` tokens, its shape, and how many seconds its load took, kernels aside.
    dtype "auto": the checkpoint's. spare_chunks: at the arena's beginning, of which KV uses what it needs. speculator: mtp: with
    the checkpoint's predictor."""
    checkpoint = scan_one(path)
    if checkpoint.shape is None or not checkpoint.complete:
        raise SystemExit(f"{path}: {checkpoint.error or checkpoint.reason}")
    shape, dtype = checkpoint.shape, checkpoint.shape.dtype if dtype == "auto" else dtype
    if speculator == MTP:
        if checkpoint.predicting is None:
            raise SystemExit(f"{path}: has no predictor. {checkpoint.predictor_error}")
        shape = checkpoint.predicting
    blocks = num_rows * -(-length // BLOCK_TOKENS)
    num_chunks = spare_chunks - (-blocks * kv_layout.block_bytes(shape, dtype, BLOCK_TOKENS) // CHUNK_BYTES)
    weights_chunks = -(-layout.weights_bytes(shape, dtype, FORMATS[quantize]) // CHUNK_BYTES)
    place = ("cpu:0", num_chunks + weights_chunks, CHUNK_BYTES)
    configure = Configure(*place, 0, MAX_BATCHED_TOKENS, BLOCK_TOKENS, 10.0, threads, cache_dir=str(ROOT / ".cache"))
    runner = TorchRunner(CpuBackend(CpuMemory(num_chunks + weights_chunks, CHUNK_BYTES), configure), configure)
    runner.watch_kernels(lambda news: news.apply() if news.apply is not None else None)
    limits = (weights_chunks, 0, 0, length, num_rows)
    identity = (1, path.name, str(path), dtype, checkpoint.fingerprint)
    spec = LoadModel(*identity, *limits, [], quantize=quantize, kv_cache_dtype=kv_cache_dtype, speculator=speculator)
    begin = time.perf_counter()
    chunks = np.arange(num_chunks, num_chunks + weights_chunks, dtype=np.int32)
    task = LoadTask(spec, chunks, lambda done, total: None, lambda: False)
    model = runner.load(task)
    assert isinstance(model, CpuModel)
    return model, shape, time.perf_counter() - begin - task.kernels_seconds


def measure(
    path: Path, dtype: str, num_rows: int, context: int, prompt: int, steps: int, threads: int, quantize: str
) -> dict[str, object]:
    length = context + steps + 8
    model, shape, load_s = load_model(path, dtype, num_rows, length, threads, quantize)
    table, slots = make_table(num_rows, length, shape.vocab_size), np.arange(num_rows, dtype=np.int32)

    at_once = max(1, MAX_BATCHED_TOKENS // prompt)
    for first in range(0, num_rows, at_once):  # row counts seen for the first time cost oneDNN a set-up
        step(model, table, slots[first : first + at_once], 0, prompt)
    clock = Clock()
    for first in range(0, num_rows, at_once):
        step(model, table, slots[first : first + at_once], 0, prompt)
    prefill_wall, prefill_cpu = clock.us_per(num_rows * prompt)
    for _ in range(3):
        step(model, table, slots, context, 1)
    clock = Clock()
    for at in range(steps):
        table.tokens[slots, context + at + 1] = step(model, table, slots, context + at, 1)
    wall, cpu = clock.us_per(num_rows * steps)
    return {
        "benchmark": "forward",
        "model": path.name,
        "dtype": shape.dtype if dtype == "auto" else dtype,
        "quantize": quantize,
        "rows": num_rows,
        "context": context,
        "threads": model.num_threads,
        "wall_us_per_token": wall,
        "cpu_us_per_token": cpu,
        "step_ms": round(wall * num_rows / 1e3, 3),
        "prefill_wall_us_per_token": prefill_wall,
        "prefill_cpu_us_per_token": prefill_cpu,
        "load_s": round(load_s, 3),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.forward", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--quantize", default="", choices=("", "int8", "packed"))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=192, help="tokens each row has at the first step")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prefill that is timed")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    sizes = (options.rows, options.context, options.prompt, options.steps, options.threads)
    print(json.dumps(measure(options.model, options.dtype, *sizes, options.quantize)))


if __name__ == "__main__":
    main()
