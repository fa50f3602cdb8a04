"""Compiles attention with every tile of the table (engine/cuda/kernels/tiles.py) for the GPUs that take it, on a machine without a
GPU, in the form that needs most registers: with windows and a softcap. Prints one JSON line for each.

usage: python -m tests.engine.kernels.compile_tiles [CAPABILITY]… [--entries] [--half] [--kernel NAME] (not under
TRITON_INTERPRET; --entries: without the tiles that an engine compares an entry with; --half: without float32; --kernel: extend or
decode alone)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from engine.cuda.kernels import entry, tiles, triton_decode, triton_extend
from engine.cuda.kernels.tiles import DECODE_KERNEL, EXTEND_KERNEL, Key, Tile
from engine.cuda.launches import NoGpu
from loader.shapes.kv_dtypes import FP8_CAPABILITY, KV_FP8
from tests.engine.kernels.compile_for_hopper import assembled, kept_as

# GPUs that are compiled for, by the architecture whose entries they take
CAPABILITIES = {tiles.A100: (80,), tiles.ADA: (86, 89), tiles.HOPPER: (90,), tiles.B200: (100,), tiles.RTX50: (120,)}
KERNELS = {EXTEND_KERNEL: triton_extend._extend_kernel, DECODE_KERNEL: triton_decode._piece_kernel}
HEADS, KV_HEADS, ROWS = 16, 4, 8


def has_fp8(capability: int) -> bool:
    return (capability // 10, capability % 10) >= FP8_CAPABILITY


def entries(kernel: str, capability: int, only_half: bool) -> Iterator[tuple[Key, tiles.Entry]]:
    """Yields the entries that a GPU may use. only_half: those of numbers of two bytes alone."""
    for key, found in tiles.TABLES[kernel].items():
        if only_half and key.item_bytes != tiles.HALF:
            continue
        if key.architecture == tiles.architecture(capability) and (not key.fp8 or has_fp8(capability)):
            yield key, found


def launch(kernel: str, key: Key, tile: Tile, dtype: torch.dtype) -> None:
    """Launches attention with heads of a key's size."""
    kept = KV_FP8 if key.fp8 else str(dtype).removeprefix("torch.")
    kv, dim = kept_as(kept, (2, KV_HEADS, key.head_dim)), key.head_dim
    ints, table = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS + 1, 64, dtype=torch.int32)
    qkv = torch.zeros(ROWS, (HEADS + 2 * KV_HEADS) * dim, dtype=dtype)
    out = torch.zeros(ROWS, HEADS * dim, dtype=dtype)
    with tiles.forced(tile):
        if kernel == DECODE_KERNEL:
            work = triton_decode.make_work(ROWS, 132, KV_HEADS, "cpu")
            triton_decode.decode_attention(qkv, *kv, 3, HEADS, table, ints, work, 0.1, 50.0, None, False, out)
        else:
            columns = (table, ints, ints, ints, tile.tokens, ints, ints, ints)
            triton_extend.extend_attention(qkv, *kv, 3, HEADS, *columns, 4096, 0.1, 50.0, None, False, out)


def main(capabilities: list[int], with_others: bool, only_half: bool, kernels: list[str]) -> None:
    assert not entry.INTERPRETED
    made: list[Any] = []
    run = JITFunction.run

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if kernel in KERNELS.values():
            made.append(run(kernel, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compiled
    for capability in capabilities:
        triton.runtime.driver.set_active(NoGpu(capability))
        for kernel in KERNELS.values():
            kernel.device_caches.clear()  # which do not know the capability
        for kernel in kernels:
            for key, found in entries(kernel, capability, only_half):
                for tile in (found.tile, *(found.others if with_others else ())):
                    launch(kernel, key, tile, torch.bfloat16 if key.item_bytes == tiles.HALF else torch.float32)
                    code = made.pop()
                    line = {
                        "capability": capability,
                        "kernel": kernel,
                        **key._asdict(),
                        **tile._asdict(),
                        "measured": found.measured and tile == found.tile,
                        "is_entry": tile == found.tile,
                        "shared_bytes": code.metadata.shared,
                        "matrix": next((name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in code.asm["ptx"]), ""),
                    }
                    print(json.dumps(line | assembled(code.asm["cubin"], listed=False)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="compile_tiles", description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("capability", type=int, nargs="*")
    parser.add_argument("--entries", action="store_true")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--kernel", choices=sorted(KERNELS), default="")
    asked = parser.parse_args()
    every = [one for some in CAPABILITIES.values() for one in some]
    main(asked.capability or every, not asked.entries, asked.half, [asked.kernel] if asked.kernel else list(KERNELS))
