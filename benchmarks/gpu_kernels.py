"""Each Triton kernel at the sizes of an 8B model against the measured bandwidth or matrix rate. One JSON line a kernel.

usage: python -m benchmarks.gpu_kernels [--tiny]: on a GPU, or on the CPU through Triton's interpreter at sizes that only show that
the script runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_limits import CACHE_DIR, copy_bytes_per_s, gemm_flops, read_bytes_per_s, seconds_of
from engine.cuda import overlap_choice, overlap_trial
from engine.cuda.graphs import captured
from engine.cuda.kernels import (
    entry,
    linear_choice,
    triton_decode,
    triton_extend,
    triton_overlap,
    triton_rope,
    triton_rows,
    triton_sampling,
    triton_unpack,
)
from engine.cuda.model import DECODE_PIECES_PER_CORE
from engine.cuda.ops import CudaOps
from engine.memory.arena import kv_views
from engine.ops import reference
from loader.files.frame import FRAME_VALUES
from loader.packing import codec
from loader.shapes import kv_layout
from loader.shapes.kv_dtypes import KV_FP8, kv_dtype_named

BLOCK_TOKENS = 16
SMALL_LAYERS = overlap_trial.Sizes(64, 96, 4, 2, 16, 20, num_layers=1, dtype="float32")
CACHES_BYTES = 512 << 20  # inputs are taken in turn from so much memory, or the cache would be measured


class Table:
    """Prints a line as soon as it is known, and keeps it in `lines`. quiet: without printing it."""

    def __init__(self, device: str, tiny: bool, quiet: bool = False) -> None:
        self.device, self.tiny, self._quiet = device, tiny, quiet
        self.lines: list[dict[str, Any]] = []
        self.copy, self.read = copy_bytes_per_s(device, tiny), read_bytes_per_s(device, tiny)
        self.gemm = gemm_flops(device, tiny)
        rates = {"copy_gb_s": round(self.copy / 1e9, 1), "read_gb_s": round(self.read / 1e9, 1)}
        print(json.dumps({"benchmark": "gpu_limits", **rates, "gemm_tflops": round(self.gemm / 1e12, 1)}))

    def bytes(self, name: str, case: str, num_bytes: int, call: Callable[[], Any], reads: bool = False) -> float:
        """Returns the share of the copy's bandwidth; of that of a sum if the kernel writes next to nothing (reads)."""
        seconds = seconds_of(call, self.device, 3 if self.tiny else 30)
        rate, limit = num_bytes / seconds, self.read if reads else self.copy
        self._print(name, case, seconds, gb_s=round(rate / 1e9, 1), of_limit=round(rate / limit, 3))
        return rate / limit

    def flops(self, name: str, case: str, num_flops: float, call: Callable[[], Any]) -> None:
        seconds = seconds_of(call, self.device, 3 if self.tiny else 20)
        rate = num_flops / seconds
        self._print(name, case, seconds, tflops=round(rate / 1e12, 1), of_limit=round(rate / self.gemm, 3))

    def _print(self, name: str, case: str, seconds: float, **figures: float) -> None:
        self.tell({"benchmark": "gpu_kernels", "kernel": name, "case": case, "us": round(seconds * 1e6, 1)} | figures)

    def tell(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if not self._quiet:
            print(json.dumps(line), flush=True)


def make_kv(
    num_blocks: int, layers: int, kv_heads: int, head_dim: int, kv_dtype: str, device: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and values that are normal numbers, and their scales if they are fp8."""
    block_bytes = layers * 2 * kv_heads * BLOCK_TOKENS * kv_dtype_named(kv_dtype).head_bytes(head_dim)
    group = kv_layout.KVGroupSpec("full", BLOCK_TOKENS, block_bytes, tuple(range(layers)))
    kv, scales = kv_views(
        torch.empty(num_blocks * block_bytes, dtype=torch.uint8, device=device), group, (2, kv_heads, head_dim), kv_dtype
    )
    if scales is None:
        kv.normal_()
    else:
        kv.copy_(reference.quantize_fp8(torch.randn(kv.shape[1:], device=device))[0])  # each block holds the same
        scales.fill_(120)
    return kv, scales


def about(heads: int, kv_heads: int, head_dim: int, kv_dtype: str) -> str:
    return f"{heads}/{kv_heads} heads of {head_dim}{', fp8 KV' if kv_dtype == KV_FP8 else ''}"


def decode(
    table: Table, rows: int, context: int, heads: int, kv_heads: int, head_dim: int, window: int = 0, kv_dtype: str = ""
) -> None:
    dtype, device = (torch.float32 if table.tiny else torch.bfloat16), table.device
    kv_dtype = kv_dtype or str(dtype).removeprefix("torch.")
    seen = min(window or context, context)
    layer_bytes = rows * seen * 2 * kv_heads * kv_dtype_named(kv_dtype).head_bytes(head_dim)
    layers = 1 if table.tiny else max(1, min(8, CACHES_BYTES // layer_bytes))
    blocks = -(-context // BLOCK_TOKENS)
    kv = make_kv(rows * blocks, layers, kv_heads, head_dim, kv_dtype, device)
    block_table = torch.randperm(rows * blocks).int().view(rows, blocks).to(device)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim).to(dtype).to(device)
    places = torch.arange(rows, dtype=torch.int32, device=device)
    contexts = torch.full((rows,), context, dtype=torch.int32, device=device)
    out = torch.empty(rows, heads * head_dim, dtype=dtype, device=device)
    cores = torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 2
    case, shares = f"{rows} x {context}, {about(heads, kv_heads, head_dim, kv_dtype)}", dict[int, float]()
    if window:
        case += f", window {window}"
    for per_core in (DECODE_PIECES_PER_CORE,) if table.tiny else (4, 8, 16, 32):
        work = entry.split_contexts(contexts, window, max(1, cores * per_core // kv_heads), kv_heads)
        turn = [0]

        def call(work: Any = work, turn: list[int] = turn) -> None:
            turn[0] = (turn[0] + 1) % layers
            triton_decode.decode_attention(
                qkv, *kv, turn[0], heads, block_table, places, work, head_dim**-0.5, 0.0, None, entry.INTERPRETED, out
            )

        shares[per_core] = table.bytes("decode attention", f"{case}, {per_core} a core", layer_bytes, call, reads=True)
    found = {"served_of_limit": shares[DECODE_PIECES_PER_CORE], "best_of_limit": max(shares.values())}
    line = {"benchmark": "gpu_kernels", "kernel": "decode attention", "case": case}
    table.tell(line | {name: round(share, 3) for name, share in found.items()})


def extend(table: Table, new: int, before: int, heads: int, kv_heads: int, head_dim: int, kv_dtype: str = "") -> None:
    dtype, device = (torch.float32 if table.tiny else torch.bfloat16), table.device
    kv_dtype = kv_dtype or str(dtype).removeprefix("torch.")
    context = before + new
    blocks = -(-context // BLOCK_TOKENS)
    kv = make_kv(blocks, 1, kv_heads, head_dim, kv_dtype, device)
    block_table = torch.randperm(blocks).int().view(1, blocks).to(device)
    qkv = torch.randn(new, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    out = torch.empty(new, heads * head_dim, dtype=dtype, device=device)
    size = triton_extend.tile_tokens([head_dim], dtype, kv[1] is not None)
    firsts = torch.arange(0, new, size, dtype=torch.int32, device=device).flip(0)

    def one(value: int) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.int32, device=device)

    zero, columns = one(0), (one(0), one(new), one(context))
    flops = 4.0 * heads * head_dim * (new * before + new * (new + 1) / 2)

    def call() -> None:
        triton_extend.extend_attention(
            qkv, *kv, 0, heads, block_table, zero, torch.zeros_like(firsts), firsts, size, *columns, 0, head_dim**-0.5, 0.0, None,
            entry.INTERPRETED, out,
        )  # fmt: skip

    table.flops("extend attention", f"{new} after {before}, {about(heads, kv_heads, head_dim, kv_dtype)}", flops, call)


def few_rows(table: Table, num_rows: int, num_outputs: int, num_inputs: int, gelu: bool | None = None) -> None:
    """Ours, and torch's, of the same weights; unless gelu is None, with the activation of gates and ups."""
    dtype, device = (torch.float32 if table.tiny else torch.bfloat16), table.device
    copies = 1 if table.tiny else max(1, CACHES_BYTES // (num_outputs * num_inputs * dtype.itemsize))
    weights = torch.randn(copies, num_outputs, num_inputs, device=device).to(dtype)
    x, turn = torch.randn(num_rows, num_inputs, device=device).to(dtype), [0]
    for name, product in (("ours", linear_choice.ours), ("torch", linear_choice.torchs)):

        def call(product: Any = product) -> None:
            turn[0] = (turn[0] + 1) % copies
            product(x, weights[turn[0]], None, gelu)

        num_bytes = num_outputs * num_inputs * dtype.itemsize
        kernel = "linear" if gelu is None else "gated linear"
        table.bytes(kernel, f"{num_rows} x {num_inputs} -> {num_outputs}, {name}", num_bytes, call, reads=True)


def rows(table: Table, num_rows: int, width: int, inner: int) -> None:
    dtype, device = (torch.float32 if table.tiny else torch.bfloat16), table.device
    copies = 1 if table.tiny else max(1, CACHES_BYTES // (num_rows * inner * 2 * dtype.itemsize))
    x = torch.randn(copies, num_rows, width, device=device).to(dtype)
    residual, gate_up = torch.randn_like(x), torch.randn(copies, num_rows, 2 * inner, device=device).to(dtype)
    out, gated = torch.empty_like(x[0]), torch.empty(num_rows, inner, dtype=dtype, device=device)
    turn = [0]

    def next_turn() -> int:
        turn[0] = (turn[0] + 1) % copies
        return turn[0]

    def norm() -> None:
        at = next_turn()
        triton_rows.rms_norm(x[at], residual[at], x[0, 0], 1e-5, False, out)

    table.bytes("add + RMS norm", f"{num_rows} x {width}", 4 * num_rows * width * dtype.itemsize, norm)
    gate_bytes = 3 * num_rows * inner * dtype.itemsize
    table.bytes(
        "SiLU x up", f"{num_rows} x {inner}", gate_bytes, lambda: triton_rows.gate_and_mul(gate_up[next_turn()], False, gated)
    )


def rope(table: Table, num_tokens: int, heads: int, kv_heads: int, head_dim: int, kv_dtype: str = "") -> None:
    dtype, device = (torch.float32 if table.tiny else torch.bfloat16), table.device
    kv_dtype = kv_dtype or str(dtype).removeprefix("torch.")
    blocks = -(-num_tokens // BLOCK_TOKENS)
    kv = make_kv(blocks, 1, kv_heads, head_dim, kv_dtype, device)
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    turns = torch.randn(num_tokens, head_dim, device=device)
    slots, norm = torch.randperm(blocks * BLOCK_TOKENS)[:num_tokens].to(device), torch.ones(head_dim, dtype=dtype, device=device)
    stored = num_tokens * 2 * kv_heads * kv_dtype_named(kv_dtype).head_bytes(head_dim)
    num_bytes = (qkv.numel() + num_tokens * heads * head_dim) * dtype.itemsize + stored
    for name, norms in (("RoPE + KV write", (None, None)), ("norms + RoPE + KV write", (norm, norm))):

        def call(norms: tuple[Any, Any] = norms) -> None:
            triton_rope.rope_and_store(qkv, turns, *norms, False, 1e-6, *kv, 0, heads, slots)

        table.bytes(name, f"{num_tokens} tokens, {about(heads, kv_heads, head_dim, kv_dtype)}", num_bytes, call)


def sampling(table: Table, num_rows: int, vocab: int) -> None:
    dtype, device = (torch.float32 if table.tiny else torch.bfloat16), table.device
    logits = (torch.randn(num_rows, vocab, device=device) * 3).to(dtype)
    keys = torch.randint(-(2**31), 2**31 - 1, (num_rows,), dtype=torch.int32, device=device)
    ids, bad = torch.empty(num_rows, dtype=torch.int32, device=device), torch.empty(num_rows, dtype=torch.int8, device=device)
    for name, temperature, top_p, top_k in (
        ("greedy", 0.0, 1.0, 0),
        ("temperature", 1.0, 1.0, 0),
        ("top_p 0.9", 0.7, 0.9, 0),
        ("top_k 20, top_p 0.95", 0.6, 0.95, 20),
        ("top_k 1000, top_p 0.95", 0.6, 0.95, 1000),
    ):
        column = torch.ones(num_rows, device=device)
        settings = (column * temperature, column * top_p, (column * top_k).int(), column * 0)
        call = partial(triton_sampling.sample, logits, *settings, keys, keys, ids, bad)
        table.bytes("sampling", f"{num_rows} x {vocab}, {name}", logits.numel() * dtype.itemsize, call, reads=True)


def packed_weights(table: Table, num_values: int) -> None:
    """GB/s of weights that come out."""
    values = (torch.randn(num_values) * 0.02).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    frames = [codec.encode(values[at : at + FRAME_VALUES]) for at in range(0, num_values, FRAME_VALUES)]
    begins = torch.tensor([0] + [len(frame) for frame in frames[:-1]]).cumsum(0).to(table.device)
    data = torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8).to(table.device)
    out = torch.empty(num_values, dtype=torch.int16, device=table.device)
    refused = torch.zeros(1, dtype=torch.int32, device=table.device)
    case = f"{num_values} values"
    table.bytes("packed weights", case, 2 * num_values, lambda: triton_unpack.unpack(data, begins, FRAME_VALUES, out, refused))


def layers(table: Table, num_rows: int) -> None:
    """Some layers of a 1B model's decode step, whose kernels run apart or overlap: times of a captured graph, and whether those
    that overlap have the right results. Interpreted, and on GPUs without it, the layers are only launched."""
    line: dict[str, Any] = {"benchmark": "gpu_kernels", "kernel": "overlapping layers", "case": f"{num_rows} rows"}
    if table.tiny or torch.cuda.get_device_capability() not in [divmod(one, 10) for one in triton_overlap.CAPABILITIES]:
        sizes = SMALL_LAYERS if table.tiny else None
        overlap_trial.Layers(num_rows, BLOCK_TOKENS, table.device, 2, sizes).launch()
        table.tell(line)
        return
    num_cores = torch.cuda.get_device_properties(0).multi_processor_count
    of_device = (BLOCK_TOKENS, table.device, num_cores, partial(captured, torch.device(table.device)))
    times = overlap_choice.measured_on(*of_device)(num_rows)
    is_right = overlap_choice.compared_on(*of_device)(num_rows)
    apart, overlapping = (0.0, 0.0) if times is None else map(statistics.median, times)
    figures = {"apart_us": round(apart * 1e6, 1), "overlapping_us": round(overlapping * 1e6, 1)}
    table.tell(line | figures | {"ratio": round(overlapping / apart, 3) if apart else None, "is_right": is_right})


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_kernels", description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    CudaOps(CACHE_DIR)  # has Triton keep compiled kernels there
    table = Table("cpu" if tiny else "cuda", tiny)
    if tiny:
        decode(table, 2, 20, 4, 2, 16)
        extend(table, 20, 5, 4, 2, 16)
        few_rows(table, 1, 8, 16)
        few_rows(table, 1, 8, 16, gelu=False)
        rows(table, 2, 16, 32)
        rope(table, 2, 4, 2, 16)
        decode(table, 2, 20, 4, 2, 16, kv_dtype=KV_FP8)
        extend(table, 20, 5, 4, 2, 16, kv_dtype=KV_FP8)
        rope(table, 2, 4, 2, 16, kv_dtype=KV_FP8)
        sampling(table, 2, 50)
        layers(table, 1)
        packed_weights(table, 5000)
        return
    decode(table, 64, 4096, 32, 8, 128)
    decode(table, 1, 4096, 32, 8, 128)
    decode(table, 8, 32768, 32, 8, 128)
    decode(table, 256, 512, 32, 8, 128)
    decode(table, 64, 4096, 32, 8, 64)
    decode(table, 64, 8192, 8, 4, 256, window=1024)
    decode(table, 64, 4096, 32, 8, 128, kv_dtype=KV_FP8)
    extend(table, 8192, 0, 32, 8, 128, kv_dtype=KV_FP8)
    rope(table, 2048, 32, 8, 128, kv_dtype=KV_FP8)
    for num_rows in (1, 4):
        for num_outputs, num_inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)):
            few_rows(table, num_rows, num_outputs, num_inputs)
        few_rows(table, num_rows, 28672, 4096, gelu=False)
    for new, before in ((2048, 0), (8192, 0), (512, 8192)):
        extend(table, new, before, 32, 8, 128)
    for num_rows in (1, 64, 2048):
        rows(table, num_rows, 4096, 14336)
        rope(table, num_rows, 32, 8, 128)
    for num_rows in (1, 64, 256):
        sampling(table, num_rows, 128256)
    packed_weights(table, 4096 * 14336)
    for num_rows in overlap_trial.ROWS:
        layers(table, num_rows)


if __name__ == "__main__":
    main()
