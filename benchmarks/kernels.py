"""Compares what the CPU kernels do with what the machine can do in the same run.

Limits, all of this run: bytes a second of the one-row kernel (ops.linear) over 2 GiB of matrices, and of a plain sum over the same;
operations a second of `F.linear` at 128 rows. Matrices and caches are views of those 2 GiB, taken in turn, together twice as large
as the processor's largest cache, so that next to nothing is found there. Rows of `linear` compare ops.linear with `F.linear`; rows
of `attention` give a decode step's time over that of reading its keys and values at the one-row kernel's rate, mid's and one-b's
shapes among them, both as recorded steps make their calls (`called_us`: from Python, for whose own data a call's leave no room in
the caches); rows of `prefill` compare attention of prompts with torch's over a gathered context; rows of `elementwise` what they
read and write, each once, a second. Kernels are compiled once, into .cache.

usage: python -m benchmarks.kernels [--only linear,attention,prefill,elementwise] [--threads N]: JSON lines and a table for each.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from engine.host.process import num_cores, prepare_process

prepare_process()  # before torch is imported

import numba  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from benchmarks.huge_pages import placed  # noqa: E402
from benchmarks.run import machine, table  # noqa: E402
from benchmarks.server import ROOT  # noqa: E402
from engine.cpu.batch import GroupBatch, HostBatch  # noqa: E402
from engine.cpu.ops import CpuOps  # noqa: E402
from engine.cpu.programs.program import Recorder, Scratch, recording  # noqa: E402
from engine.cpu.programs.replay import Replay  # noqa: E402

ops = CpuOps(str(ROOT / ".cache"))

READ_BYTES = 2 << 30  # that the limits are measured over: a model's worth, of which no cache holds much
HEADS = ((8, 1), (4, 3), (8, 4), (4, 8), (1, 8))  # KV heads, query heads of each
MODEL_OF = {(64, 4, 3): "mid", (64, 8, 4): "one-b"}  # by head size and heads
MIN_S = 0.12  # a figure's share of the run
BLOCK_TOKENS = 16
# [outputs, inputs] of mid and one-b: queries, keys and values; output; gate and up; down; head
SHAPES = {
    "mid": ((1280, 768), (768, 768), (4096, 768), (768, 2048), (32000, 768)),
    "one-b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (32000, 2048)),
}
BANDWIDTHS = ("one_row_gb_s", "read_gb_s")
ROWS = (1, 2, 4, 6, 8, 12, 16, 32, 64, 128, 256)


def _largest_cache_bytes() -> int:
    """Returns the bytes of the largest cache that Linux reports; 0 if it reports none."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes if size[-1] in "KM"), default=0)


COLD_BYTES = max(192 << 20, 2 * _largest_cache_bytes())  # more than half of what is taken in turn is in no cache
_LARGEST_LAYER_BYTES = 32 * 4096 * 2 * 8 * 128 * 4  # of attention's shapes, in float32


@numba.njit(parallel=True, fastmath=True)
def read_all(words: Any) -> Any:
    """Returns the sum of the words, which takes the time of reading them."""
    total = np.float32(0.0)
    for i in numba.prange(words.shape[0]):
        total += words[i]
    return total


def seconds(calls: Sequence[Callable[[], Any]], *, min_s: float | None = None) -> float:
    """Median time of a call, the calls taken in turn for min_s at least."""
    for call in calls[:2]:
        call()
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < (MIN_S if min_s is None else min_s) or len(times) < 5:
        for call in calls:
            at = time.perf_counter()
            call()
            times.append(time.perf_counter() - at)
    return statistics.median(times)


def replayed_s(calls: Sequence[Callable[[], Any]]) -> float:
    """Returns the seconds of one of these calls of ops, made one after the other as a recorded step makes its own; the median of
    several runs."""
    recorder = Recorder(Scratch())
    with recording(recorder):
        for call in calls:
            call()
    return seconds([Replay(recorder.calls).run]) / len(calls)


@functools.cache
def _memory() -> Tensor:
    """[elements] bfloat16 from -0.5 to 0.5; so they are as pairs, read as float32. One piece for all that is measured: to have as
    much anew for each shape took most of the run."""
    pattern = _random(1 << 20)
    memory = placed(max(READ_BYTES, COLD_BYTES + _LARGEST_LAYER_BYTES) // pattern.nbytes, pattern.numel(), dtype=pattern.dtype)
    return memory.copy_(pattern).view(-1)


def limits() -> dict[str, float]:
    matrices = _memory()[: READ_BYTES // 2].view(-1, 8192, 2048)
    words, x = matrices.view(-1).view(torch.float32).numpy(), _random(128, 2048)
    read_all(words[:1024])
    read_s = seconds([lambda: read_all(words)], min_s=0.6)
    one_row_s = replayed_s([partial(ops.linear, x[:1], matrix) for matrix in matrices])
    gemm_s = seconds([lambda: functional.linear(x, matrices[0])], min_s=0.4)
    return {
        "read_gb_s": words.nbytes / read_s / 1e9,
        "one_row_gb_s": matrices[0].nbytes / one_row_s / 1e9,
        "gemm_gflop_s": 2 * 128 * matrices[0].numel() / gemm_s / 1e9,
    }


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.rand(*shape) - 0.5).to(dtype)


def _copies(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> list[Tensor]:
    """Matrices that together outgrow the caches, 8 bytes behind a page's boundary: a checkpoint's matrices lie at any multiple of
    8 bytes, in memory as in its file."""
    memory, behind, size = _memory().view(dtype), 8 // dtype.itemsize, num_outputs * num_inputs
    apart = -(-(size + behind) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE // dtype.itemsize
    begins = range(behind, behind + (1 + COLD_BYTES // (size * dtype.itemsize)) * apart, apart)
    return [memory[begin : begin + size].view(num_outputs, num_inputs) for begin in begins]


def linear(limit: dict[str, float], dtypes: tuple[torch.dtype, ...], rows: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """ops.linear and F.linear on the same weights, in turn. times_float32: of bfloat16, how many times as fast ours is, as recorded
    steps call it, as F.linear is with float32 of the same shape."""
    for dtype in dtypes:
        for model, shapes in SHAPES.items():
            for num_outputs, num_inputs in shapes:
                weights = _copies(num_outputs, num_inputs, dtype)
                for num_rows in rows:
                    x = _random(num_rows, num_inputs, dtype=dtype)
                    ours_s = seconds([partial(ops.linear, x, weight) for weight in weights])
                    torch_s = seconds([partial(functional.linear, x, weight) for weight in weights])
                    beside_float32 = {}
                    if dtype is torch.bfloat16:
                        recorded_s = replayed_s([partial(ops.linear, x, weight) for weight in weights])
                        wide, wide_x = _copies(num_outputs, num_inputs, torch.float32), x.float()
                        float32_s = seconds([partial(functional.linear, wide_x, weight) for weight in wide])
                        beside_float32 = {
                            "recorded_us": round(recorded_s * 1e6, 1),
                            "times_float32": round(float32_s / recorded_s, 2),
                        }
                    num_bytes = weights[0].numel() * weights[0].element_size()
                    gflop = 2 * num_rows * weights[0].numel() / 1e9
                    yield {
                        "dtype": str(dtype).removeprefix("torch."),
                        "model": model,
                        "shape": f"{num_outputs}x{num_inputs}",
                        "rows": num_rows,
                        "us": round(ours_s * 1e6, 1),
                        "gb_s": round(num_bytes / ours_s / 1e9, 1),
                        "of_read": round(num_bytes / ours_s / 1e9 / limit["read_gb_s"], 2),
                        "gflop_s": round(gflop / ours_s, 1),
                        "of_gemm": round(gflop / ours_s / limit["gemm_gflop_s"], 2),
                        "times_torch": round(torch_s / ours_s, 2),
                        **beside_float32,
                    }


def _decode_batch(num_rows: int, context: int, kv_heads: int, head_dim: int, dtype: torch.dtype, layers: int = 0) -> HostBatch:
    """One decode step of num_rows sequences over scattered blocks; layers 0: as many as outgrow the caches."""
    blocks = num_rows * -(-context // BLOCK_TOKENS)
    layer_bytes = blocks * BLOCK_TOKENS * 2 * kv_heads * head_dim * dtype.itemsize
    layers = layers or max(1, -(-COLD_BYTES // layer_bytes))
    shape = (blocks, layers, 2, kv_heads, BLOCK_TOKENS, head_dim)
    kv = _memory().view(dtype)[: math.prod(shape)].view(shape)
    table_of = np.random.default_rng(0).permutation(blocks).astype(np.int32).reshape(num_rows, -1)
    rows = np.arange(num_rows, dtype=np.int32)
    contexts = np.full(num_rows, context, np.int32)
    flat = kv.view(-1).view(torch.uint16).numpy() if dtype is torch.bfloat16 else kv.view(-1).numpy()
    group = GroupBatch(kv, flat, 0, table_of, rows.astype(np.int64), torch.zeros(num_rows, head_dim))
    places = {layer: (0, layer) for layer in range(layers)}
    ids = torch.zeros(num_rows, dtype=torch.int64)
    attended = np.array([num_rows * context])
    return HostBatch(ids, num_rows, [group], places, rows, rows * 0 + 1, contexts, rows, rows, contexts, False, attended)


def attention(limit: dict[str, float], dtypes: tuple[torch.dtype, ...], context: int = 4096) -> Iterator[dict[str, Any]]:
    """Decode over `context` stored tokens a row."""
    for dtype, num_rows, head_dim, (kv_heads, group) in product(dtypes, (1, 8, 32), (64, 128), HEADS):
        batch = _decode_batch(num_rows, context, kv_heads, head_dim, dtype)
        heads = kv_heads * group
        qkv = _random(num_rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
        calls = [partial(ops.attention, qkv, layer, heads, head_dim**-0.5, 0.0, batch) for layer in range(len(batch.layer_places))]
        ours_s, called_s = replayed_s(calls), seconds(calls)
        num_bytes = num_rows * context * 2 * kv_heads * head_dim * dtype.itemsize
        yield {
            "dtype": str(dtype).removeprefix("torch."),
            "model": MODEL_OF.get((head_dim, kv_heads, group), ""),
            "rows": num_rows,
            "head_dim": head_dim,
            "kv_heads": kv_heads,
            "heads_per_kv": group,
            "us": round(ours_s * 1e6, 1),
            "gb_s": round(num_bytes / ours_s / 1e9, 1),
            "of_reading": round(ours_s * limit["one_row_gb_s"] * 1e9 / num_bytes, 2),
            "called_us": round(called_s * 1e6, 1),
        }


def prefill(limit: dict[str, float], dtypes: tuple[torch.dtype, ...]) -> Iterator[dict[str, Any]]:
    """One layer's attention of a prompt's last `tokens` of `context`, and by what torch makes of a gathered context."""
    for dtype in dtypes:
        for model, kv_heads, group, head_dim in (("mid", 4, 3, 64), ("one-b", 8, 4, 64), ("", 8, 4, 128)):
            for context, num_tokens in ((128, 128), (512, 512), (2048, 512)):
                decode = _decode_batch(1, context, kv_heads, head_dim, dtype, layers=1)
                heads, none = kv_heads * group, np.zeros(0, np.int32)
                num_new, contexts = np.array([num_tokens], np.int32), np.array([context], np.int32)
                ids = torch.zeros(num_tokens, dtype=torch.int64)
                starts = np.zeros(1, np.int32)
                shape = (starts, num_new, contexts, none, none, none)
                batch = HostBatch(ids, num_tokens, decode.groups, {0: (0, 0)}, *shape, True, np.array([num_tokens * context]))
                qkv = _random(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
                call = partial(ops.attention, qkv, 0, heads, head_dim**-0.5, 0.0, batch)
                ours_s = seconds([call])
                kernels, ops.kernels = ops.kernels, None
                torch_s = seconds([call])
                ops.kernels = kernels
                pairs = num_tokens * (context - num_tokens) + num_tokens * (num_tokens + 1) / 2
                yield {
                    "dtype": str(dtype).removeprefix("torch."),
                    "model": model,
                    "head_dim": head_dim,
                    "context": context,
                    "tokens": num_tokens,
                    "ms": round(ours_s * 1e3, 2),
                    "gflop_s": round(4 * head_dim * heads * pairs / ours_s / 1e9, 1),
                    "of_gemm": round(4 * head_dim * heads * pairs / ours_s / 1e9 / limit["gemm_gflop_s"], 2),
                    "times_torch": round(torch_s / ours_s, 2),
                }


def elementwise(limit: dict[str, float], dtypes: tuple[torch.dtype, ...]) -> Iterator[dict[str, Any]]:
    """Row-wise work of one layer of one-b; its data are in the caches, as they are in a step."""
    hidden, inner, heads, kv_heads, head_dim = 2048, 8192, 32, 8, 64
    for dtype in dtypes:
        for num_rows in (1, 32, 128, 512):
            batch = _decode_batch(num_rows, BLOCK_TOKENS, kv_heads, head_dim, dtype)
            x, residual, weight = _random(num_rows, hidden, dtype=dtype), _random(num_rows, hidden, dtype=dtype), _random(hidden)
            gate_up = _random(num_rows, 2 * inner, dtype=dtype)
            qkv = _random(num_rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
            calls: dict[str, tuple[Callable[[], Any], int]] = {
                "add_rms_norm": (partial(ops.add_rms_norm, x, residual, weight.to(dtype), 1e-5), 4 * x.numel()),
                "silu_and_mul": (partial(ops.silu_and_mul, gate_up), gate_up.numel() * 3 // 2),
                "rope_and_store": (partial(ops.rope_and_store, qkv, None, 0, heads, batch), 2 * qkv.numel()),
            }
            for name, (call, elements) in calls.items():
                ours_s = seconds([call])
                num_bytes = elements * dtype.itemsize
                yield {
                    "dtype": str(dtype).removeprefix("torch."),
                    "operation": name,
                    "rows": num_rows,
                    "us": round(ours_s * 1e6, 1),
                    "gb_s": round(num_bytes / ours_s / 1e9, 1),
                    "of_read": round(num_bytes / ours_s / 1e9 / limit["read_gb_s"], 2),
                }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=__doc__)
    parser.add_argument("--only", default="linear,attention,prefill,elementwise", help="parts to run")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="of linear")
    parser.add_argument("--few-rows", type=int, default=0, help="switch to torch's linear above so many rows, to find where to")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--min-s", type=float, default=MIN_S)
    options = parser.parse_args()
    globals()["MIN_S"] = options.min_s
    dtypes = tuple(getattr(torch, name) for name in options.dtypes.split(","))
    for name in options.dtypes.split(","):
        ops.prepare(name, options.threads)
    ops.set_num_threads(options.threads)
    if options.few_rows:
        ops.kernels.FEW_ROWS.update(dict.fromkeys(ops.kernels.FEW_ROWS, options.few_rows))
    limit = {name: round(value, 1) for name, value in limits().items()}
    print(json.dumps({"benchmark": "kernels", **machine(), **limit, "threads": options.threads}))
    for name in options.only.split(","):
        if name == "linear":
            rows = list(linear(limit, dtypes, tuple(map(int, options.rows.split(",")))))
        else:
            rows = list({"attention": attention, "prefill": prefill, "elementwise": elementwise}[name](limit, dtypes))
        for row in rows:
            print(json.dumps({"benchmark": "kernels", "kind": name, **row, **{key: limit[key] for key in BANDWIDTHS}}))
        print(f"\n{table(rows, {key: key.replace('_', ' ') for key in rows[0]})}\n")


if __name__ == "__main__":
    main()
