"""Measures the memory that bfloat16 weights take if they stay packed (loader/formats/packed_rows.py), and the time that products
with them take.

Bytes: of one-b's matrices with weights as they are drawn (normal, 0.02), and of the demo's trained models; `escapes` is the share
of weights whose exponent is stored by itself, `unpack_us` what it takes to write the plain matrix.

Time: products of one to four rows with a matrix, plain as the engine makes them (ops.linear) and packed, and a plain sum over the
plain matrices, which is what the machine reads. All three in turn, as recorded steps make their calls, over copies of the matrix
that together outgrow the caches; the fastest of all turns counts, because other work only adds to it. GB/s are of the bytes that
each reads. `same_bits`: whether the products are equal. The last lines are all products of a step of one-b: 16 layers and the head.

usage: python -m benchmarks.packed_residence [--rows 1,2,3,4] [--threads 1,2] [--seconds 3]: JSON lines and tables.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.host.process import num_cores, prepare_process

prepare_process()  # before torch is imported

import numba  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402

from benchmarks.huge_pages import placed  # noqa: E402
from benchmarks.kernels import COLD_BYTES, SHAPES, ops, read_all  # noqa: E402
from benchmarks.run import machine, table  # noqa: E402
from benchmarks.server import ROOT  # noqa: E402
from engine.cpu.kernels import packed_linear  # noqa: E402
from engine.cpu.kernels.entry import Forms, num_shares  # noqa: E402
from engine.cpu.kernels.packed_tiles import IS_FUSED  # noqa: E402
from engine.cpu.products import array  # noqa: E402
from engine.cpu.programs.program import Recorder, Scratch, recording  # noqa: E402
from engine.cpu.programs.replay import Replay  # noqa: E402
from loader.formats.packed_rows import PackedRows, pack  # noqa: E402

MODEL = "one-b"
MATRICES = ("queries, keys, values", "output", "gate, up", "down", "head")  # of SHAPES
LAYERS = 16
DEVIATION = 0.02  # of the weights that are drawn
DEMO_MODELS = ROOT / "demo" / "models"
PRODUCT = Forms(packed_linear.packed_linear_serial, packed_linear.packed_linear_parallel, lambda args: num_shares() > 1)
UNPACKING = Forms(packed_linear.unpack_rows_serial, packed_linear.unpack_rows_parallel, lambda args: num_shares() > 1)
NO_BIAS = np.empty(0, np.uint16)


def prepare(threads: int) -> None:
    ops.prepare("bfloat16", threads)
    for forms, signature in ((PRODUCT, packed_linear.PACKED_LINEAR), (UNPACKING, packed_linear.UNPACK_ROWS)):
        forms.serial.compile(signature)
        forms.parallel.compile(signature)
    read_all(np.zeros(8, np.float32))


def held(values: Any) -> Any:
    """Returns a copy of an array, as the engine keeps weights."""
    copy = placed(max(1, values.nbytes), dtype=torch.uint8).numpy()[: values.nbytes].view(values.dtype)
    copy[:] = values
    return copy


class Copies:
    """Copies of a matrix with random weights, plain and packed."""

    def __init__(self, num_outputs: int, num_inputs: int) -> None:
        weight = (torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(7)) * DEVIATION).bfloat16()
        self.packed = pack(array(weight))
        num = 1 + COLD_BYTES // self.packed.nbytes
        self.plain = placed(num, *weight.shape, dtype=torch.bfloat16).copy_(weight)
        self.arrays = [tuple(held(one) for one in self.packed.arrays) for _ in range(num)]

    def plain_products(self, x: torch.Tensor) -> tuple[Replay, Any]:
        """Returns calls of all products and the array of the last one's results."""
        recorder = Recorder(Scratch())
        with recording(recorder):
            for weight in self.plain:
                out = ops.linear(x, weight)
        return Replay(recorder.calls), array(out)

    def packed_products(self, x: torch.Tensor) -> tuple[Replay, Any]:
        recorder, out = Recorder(Scratch()), np.zeros((len(x), self.packed.num_outputs), np.uint16)
        for arrays in self.arrays:
            recorder.call(PRODUCT, array(x), *arrays, NO_BIAS, num_shares(), out)
        return Replay(recorder.calls), out

    def unpack_s(self, seconds: float) -> float:
        recorder = Recorder(Scratch())
        for arrays, weight in zip(self.arrays, self.plain, strict=True):
            recorder.call(UNPACKING, *arrays, array(weight))
        return fastest([Replay(recorder.calls).run], seconds)[0] / len(self.arrays)


def fastest(calls: list[Callable[[], Any]], seconds: float) -> list[float]:
    """Returns the shortest time of each call. They are made in turn for about so long."""
    best, end = [float("inf")] * len(calls), time.perf_counter() + seconds
    for call in calls:
        call()
    while time.perf_counter() < end:
        for number, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[number] = min(best[number], time.perf_counter() - begin)
    return best


def size(name: str, shape: str, plain_bytes: int, packed: list[PackedRows]) -> dict[str, Any]:
    num_bytes = sum(one.nbytes for one in packed)
    return {
        "weights": name,
        "shape": shape,
        "plain_mb": round(plain_bytes / 1e6, 2),
        "packed_mb": round(num_bytes / 1e6, 2),
        "of_plain": round(num_bytes / plain_bytes, 4),
        "escapes": round(2 * sum(one.num_escapes for one in packed) / plain_bytes, 4),
    }


def trained(folder: Path) -> dict[str, Any]:
    """Returns the size of a checkpoint's matrices."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        matrices = [file.get_tensor(name) for name in file.keys() if len(file.get_slice(name).get_shape()) == 2]  # noqa: SIM118
    packed = [pack(array(matrix.bfloat16())) for matrix in matrices]
    return size(f"{folder.name}, trained", f"{len(matrices)} matrices", 2 * sum(one.numel() for one in matrices), packed)


def timed(name: str, copies: Copies, num_rows: int, threads: int, seconds: float) -> dict[str, Any]:
    ops.set_num_threads(threads)
    numba.set_num_threads(threads)
    x = torch.randn(num_rows, copies.packed.num_inputs, generator=torch.Generator().manual_seed(num_rows)).bfloat16()
    (plain, wanted), (packed, found) = copies.plain_products(x), copies.packed_products(x)
    words = copies.plain.view(-1).view(torch.float32).numpy()
    num = len(copies.plain)
    plain_s, packed_s, read_s = (s / num for s in fastest([plain.run, packed.run, functools.partial(read_all, words)], seconds))
    plain_bytes = copies.plain[0].nbytes
    return {
        "matrix": name,
        "shape": f"{copies.packed.num_outputs}x{copies.packed.num_inputs}",
        "rows": num_rows,
        "threads": threads,
        "plain_us": round(plain_s * 1e6, 1),
        "packed_us": round(packed_s * 1e6, 1),
        "times_plain": round(plain_s / packed_s, 2),
        "plain_gb_s": round(plain_bytes / plain_s / 1e9, 1),
        "packed_gb_s": round(copies.packed.nbytes / packed_s / 1e9, 1),
        "read_gb_s": round(plain_bytes / read_s / 1e9, 1),
        "same_bits": bool(np.array_equal(wanted, found)),
    }


def steps(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields what all products of a step take."""
    for rows, threads in sorted({(one["rows"], one["threads"]) for one in found}):
        own = [one for one in found if (one["rows"], one["threads"]) == (rows, threads)]
        plain, packed = (
            sum(one[key] * (1 if one["matrix"] == "head" else LAYERS) for one in own) / 1e3 for key in ("plain_us", "packed_us")
        )
        ms = {"plain_ms": round(plain, 2), "packed_ms": round(packed, 2), "times_plain": round(plain / packed, 2)}
        yield {"model": MODEL, "rows": rows, "threads": threads, **ms}


def show(kind: str, lines: list[dict[str, Any]]) -> None:
    for line in lines:
        print(json.dumps({"benchmark": "packed_residence", "kind": kind, **line}))
    print(f"\n{table(lines, {key: key.replace('_', ' ') for key in lines[0]})}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,3,4")
    parser.add_argument("--threads", default=",".join(map(str, sorted({1, num_cores()}))))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each line's turns")
    options = parser.parse_args()
    rows, threads = (tuple(map(int, one.split(","))) for one in (options.rows, options.threads))
    prepare(max(threads))
    print(json.dumps({"benchmark": "packed_residence", **machine(), "fused": IS_FUSED}))
    sizes = [trained(folder.parent) for folder in sorted(DEMO_MODELS.glob("*/model.safetensors"))]
    found = []
    for name, (num_outputs, num_inputs) in zip(MATRICES, SHAPES[MODEL], strict=True):
        copies = Copies(num_outputs, num_inputs)
        ops.set_num_threads(max(threads))
        unpack_us = round(copies.unpack_s(options.seconds) * 1e6)
        plain_bytes, shape = copies.plain[0].nbytes, f"{num_outputs}x{num_inputs}"
        sizes.append(size(f"{name} of {MODEL}, drawn", shape, plain_bytes, [copies.packed]) | {"unpack_us": unpack_us})
        found += [timed(name, copies, num_rows, num, options.seconds) for num_rows in rows for num in threads]
    show("bytes", sizes[::-1])
    show("products", found)
    show("steps", list(steps(found)))


if __name__ == "__main__":
    main()
