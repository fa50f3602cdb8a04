"""Attention with tiles of several sizes at the shapes of an 8B model: what engine/cuda/kernels/tiles.py has for this kind of GPU is
chosen by this. One JSON line for each size and shape, and for each shape the fastest one. At the end, rows for the table: the tile
with the least time over all shapes of a head size, as a measured entry. Sizes that the table names for this GPU are marked: its
own entry, and those that an engine would compare it with. A size that joins pieces is measured, but no row for the table: an engine
takes it only where it has compared its results.

usage: python -m benchmarks.gpu_tiles [--tiny]: on a GPU, or on the CPU through Triton's interpreter at sizes that only show that
the script runs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from benchmarks import gpu_kernels
from benchmarks.gpu_limits import CACHE_DIR
from engine.cuda.kernels import tiles
from engine.cuda.kernels.tiles import DECODE_KERNEL, EXTEND_KERNEL, HALF, Tile
from engine.cuda.ops import CudaOps
from loader.shapes.kv_dtypes import FP8_CAPABILITY, KV_FP8

EXTEND = (
    *(Tile(tokens, positions, 8, stages) for tokens in (64, 128) for positions in (64, 128) for stages in (2, 3)),
    *(Tile(64, positions, 4, stages) for positions in (32, 64, 128) for stages in (2, 3)),
    *(Tile(256, 64, 16, stages) for stages in (2, 3)),
)
DECODE = tuple(Tile(1, positions, warps, stages) for positions in (32, 64, 128) for warps in (2, 4, 8) for stages in (2, 3, 4))


class Place(NamedTuple):
    """A place in the table, on this GPU."""

    kernel: str
    head_dim: int
    item_bytes: int
    fp8: bool

    @property
    def entry(self) -> tiles.Entry:
        return tiles.entry_of(*self)

    def marked(self, size: Tile) -> str:
        """Returns what a size is in the table: "entry", "candidate", or "" if it is not there."""
        return "entry" if size == self.entry.tile else "candidate" if size in self.entry.others else ""


def compare(table: gpu_kernels.Table, place: Place, sizes: Iterable[Tile], run: Callable[[], None]) -> dict[Tile, float]:
    """Runs a shape with each of the sizes, and with those that the table has at its place. Returns the µs that each took, without
    those that have no room."""
    took: dict[Tile, float] = {}
    for size in dict.fromkeys((place.entry.tile, *place.entry.others, *sizes)):
        table.lines.clear()
        try:
            with tiles.forced(size):
                run()
        except Exception as error:  # Triton's, of several kinds, for what has no room in shared memory
            print(json.dumps({"benchmark": "gpu_tiles", **size._asdict(), "refused": str(error).splitlines()[0][:120]}), flush=True)
            continue
        line = min((line for line in table.lines if "us" in line), key=lambda line: float(line["us"]))
        took[size] = float(line["us"])
        told = {name: line[name] for name in ("kernel", "case", "us", "of_limit")}
        print(json.dumps({"benchmark": "gpu_tiles", **told, **size._asdict(), "in_table": place.marked(size)}), flush=True)
    best = min(took, key=lambda size: took[size])
    own = took.get(place.entry.tile)
    told = {"best": best._asdict(), "us": took[best], "of_entry": None if own is None else round(took[best] / own, 3)}
    print(json.dumps({"benchmark": "gpu_tiles", **told}), flush=True)
    return took


def row(place: Place, shapes: list[dict[Tile, float]]) -> str:
    """Returns a row for the table of tiles.py. shapes: the µs of each size, for each shape at this place; the size is chosen whose
    times, over the best of each shape, have the least mean (the geometric one)."""
    everywhere = [size for size in shapes[0] if not size.joins and all(size in took for took in shapes)]
    best = min(everywhere, key=lambda size: math.prod(took[size] / min(took.values()) for took in shapes))
    gpu = tiles.architecture(tiles.capability())
    architecture = next(name for name, value in vars(tiles).items() if name.isupper() and value == gpu)
    item, kept = "HALF" if place.item_bytes == HALF else "FLOAT32", "FP8" if place.fp8 else "PLAIN"
    found = f"_measured(Tile({', '.join(map(str, best[:4]))}))"
    if any(size.joins for size in place.entry.others):
        found = f"_or_joined({found})"
    return f"    Key({architecture}, {place.head_dim}, {item}, {kept}): {found},"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_tiles", description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    CudaOps(CACHE_DIR)  # has Triton keep compiled kernels there
    table = gpu_kernels.Table("cpu" if tiny else "cuda", tiny, quiet=True)
    measured: dict[Place, list[dict[Tile, float]]] = {}

    def take(place: Place, sizes: Iterable[Tile], run: Callable[[], None]) -> None:
        measured.setdefault(place, []).append(compare(table, place, sizes, run))

    if tiny:
        extend, decode = (Place(kernel, 64, tiles.FLOAT32, False) for kernel in (EXTEND_KERNEL, DECODE_KERNEL))
        take(extend, (Tile(16, 16, 4, 1),), partial(gpu_kernels.extend, table, 20, 5, 4, 2, 16))
        take(decode, (Tile(1, 16, 4, 1),), partial(gpu_kernels.decode, table, 2, 20, 4, 2, 16))
    gpu = divmod(tiles.capability(), 10)
    for kv_dtype in () if tiny else ("bfloat16", KV_FP8)[: 1 + (gpu >= FP8_CAPABILITY)]:
        is_fp8 = kv_dtype == KV_FP8
        for dim, shapes in ((128, ((8192, 0), (2048, 0), (512, 8192))), (64, ((8192, 0),)), (256, ((4096, 0),))):
            for new, before in shapes:
                heads = 32 if dim < 256 else 16
                prompt = partial(gpu_kernels.extend, table, new, before, heads, 8, dim, kv_dtype=kv_dtype)
                take(Place(EXTEND_KERNEL, dim, HALF, is_fp8), EXTEND, prompt)
            for rows, context in ((64, 4096), (256, 512), (1, 4096)):
                step = partial(gpu_kernels.decode, table, rows, context, 32, 8, dim, kv_dtype=kv_dtype)
                take(Place(DECODE_KERNEL, dim, HALF, is_fp8), DECODE, step)
    for kernel in (EXTEND_KERNEL, DECODE_KERNEL):
        print(f"rows for {kernel.upper()} of engine/cuda/kernels/tiles.py:")
        for place, shapes_of in measured.items():
            if place.kernel == kernel:
                print(row(place, shapes_of), flush=True)


if __name__ == "__main__":
    main()
