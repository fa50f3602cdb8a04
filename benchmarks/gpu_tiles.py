"""Attention with tiles of several sizes at the shapes of an 8B model: what engine/cuda/kernels/tiles.py has for this kind of GPU is
chosen by this. One JSON line for each size, and for each shape the one that was the fastest.

usage: python -m benchmarks.gpu_tiles [--tiny]: on a GPU, or on the CPU through Triton's interpreter at sizes that only show that
the script runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable

from benchmarks import gpu_kernels
from benchmarks.gpu_limits import CACHE_DIR
from engine.cuda.kernels import tiles
from engine.cuda.kernels.tiles import Tile
from engine.cuda.ops import CudaOps
from loader.kv_dtypes import KV_FP8

EXTEND = (
    *(Tile(tokens, positions, 8, stages) for tokens in (64, 128) for positions in (64, 128) for stages in (2, 3)),
    *(Tile(64, positions, 4, stages) for positions in (32, 64, 128) for stages in (2, 3)),
    *(Tile(256, 64, 16, stages) for stages in (2, 3)),
)
DECODE = tuple(Tile(1, positions, warps, stages) for positions in (32, 64, 128) for warps in (2, 4, 8) for stages in (2, 3, 4))


Key = tuple[int, int, bool]  # as tiles.EXTEND and tiles.DECODE have it


def compare(
    table: gpu_kernels.Table, sizes: Iterable[Tile], entries: dict[Key, Tile], keys: tuple[Key, ...], run: Callable[[], None]
) -> None:
    """Runs a shape with each of the sizes in place of what `entries` have for keys. The first key is that of the shape."""
    kept, took = dict(entries), dict[Tile, float]()
    chosen = kept.get(keys[0])
    for size in sizes:
        entries.update(dict.fromkeys(keys, size))
        table.lines.clear()
        try:
            run()
        except Exception as error:  # Triton's, of several kinds, for what has no room in shared memory
            print(json.dumps({"benchmark": "gpu_tiles", **size._asdict(), "refused": str(error).splitlines()[0][:120]}), flush=True)
            continue
        line = min((line for line in table.lines if "us" in line), key=lambda line: float(line["us"]))
        took[size] = float(line["us"])
        told = {name: line[name] for name in ("kernel", "case", "us", "of_limit")}
        print(json.dumps({"benchmark": "gpu_tiles", **told, **size._asdict(), "chosen": size == chosen}), flush=True)
    entries.clear()
    entries.update(kept)
    best = min(took, key=lambda size: took[size])
    told = {"best": best._asdict(), "us": took[best], "of_chosen": ratio(took, chosen)}
    print(json.dumps({"benchmark": "gpu_tiles", **told}), flush=True)


def ratio(took: dict[Tile, float], chosen: Tile | None) -> float | None:
    """Returns the time of the fastest over that of the chosen one; None if none was chosen, or it was not measured."""
    return None if chosen not in took else round(min(took.values()) / took[chosen], 3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_tiles", description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    CudaOps(CACHE_DIR)  # has Triton keep compiled kernels there
    table, capability = gpu_kernels.Table("cpu" if tiny else "cuda", tiny, quiet=True), tiles.capability()
    if tiny:
        compare(table, (Tile(32, 32, 4, 1),), tiles.EXTEND, ((0, 16, False),), lambda: gpu_kernels.extend(table, 20, 5, 4, 2, 16))
        compare(table, (Tile(1, 32, 4, 1),), tiles.DECODE, ((0, 16, False),), lambda: gpu_kernels.decode(table, 2, 20, 4, 2, 16))
        return
    for kv_dtype in ("bfloat16", KV_FP8):
        is_fp8 = kv_dtype == KV_FP8
        for dim, shapes in ((128, ((8192, 0), (2048, 0), (512, 8192))), (64, ((8192, 0),)), (256, ((4096, 0),))):
            for new, before in shapes:

                def prompt(new: int = new, before: int = before, dim: int = dim, kv_dtype: str = kv_dtype) -> None:
                    gpu_kernels.extend(table, new, before, 32 if dim < 256 else 16, 8, dim, kv_dtype=kv_dtype)

                # how many queries the tiles of a step have depends on the head size alone
                keys = tuple((capability, dim, fp8) for fp8 in ((True, False) if is_fp8 else (False,)))
                compare(table, EXTEND, tiles.EXTEND, keys, prompt)
            for rows, context in ((64, 4096), (256, 512), (1, 4096)):

                def step(rows: int = rows, context: int = context, dim: int = dim, kv_dtype: str = kv_dtype) -> None:
                    gpu_kernels.decode(table, rows, context, 32, 8, dim, kv_dtype=kv_dtype)

                compare(table, DECODE, tiles.DECODE, ((capability, dim, is_fp8),), step)


if __name__ == "__main__":
    main()
