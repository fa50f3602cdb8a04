"""Sizes of the attention kernels' tiles: for GPUs that were measured, by their compute capability, the fastest ones (`python -m
benchmarks.gpu_tiles`); for all others sizes that fit into their shared memory.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton


class Tile(NamedTuple):
    """The size of an attention kernel's tile. tokens: query tokens that a program computes; 1 in decode steps, where each row has
    one. positions: how many are read, keys and values, at a time. warps, stages: num_warps and num_stages of Triton's launch."""

    tokens: int
    positions: int
    warps: int
    stages: int


HOPPER = 90
# Capabilities of GPUs whose programs may take 163 KiB of shared memory and more; all others have 99 KiB.
MUCH_SHARED_MEMORY = (80, HOPPER, 100, 103)
# By capability, head size padded to a power of two, and whether KV is fp8. All are of numbers of two bytes.
EXTEND = {
    (HOPPER, 128, False): Tile(128, 128, 8, 2),
    (HOPPER, 128, True): Tile(128, 128, 8, 3),
    (HOPPER, 256, False): Tile(128, 64, 8, 2),
}
DECODE = {
    (HOPPER, 128, True): Tile(1, 128, 4, 3),
}


@functools.cache
def capability() -> int:
    """Returns the compute capability of the GPU that kernels are compiled for, as a whole number (90 for 9.0); 0 where kernels are
    interpreted, or where there is no GPU."""
    if triton.knobs.runtime.interpret:
        return 0
    try:
        return int(triton.runtime.driver.active.get_current_target().arch)
    except RuntimeError:  # Triton has no driver
        return 0


def extend_tile(padded_dim: int, item_bytes: int, tokens: int = 0, fp8: bool = False) -> Tile:
    """Returns the tile of the kernel for rows with several new tokens. padded_dim: the head size, padded to a power of two.
    item_bytes: bytes of a number of the queries. tokens: how many queries the tiles of the step have, which may be those for a
    larger head size of the same model; 0: as many as are best for this head size. fp8: KV is stored as FP8 codes."""
    best = EXTEND.get((capability(), padded_dim, fp8)) if item_bytes == 2 else None
    if best is not None and tokens in (0, best.tokens):
        return best
    wide, has_much = item_bytes == 4, capability() in MUCH_SHARED_MEMORY
    if padded_dim > 256:
        own = tokens or (64 if has_much and not wide else 32)
        return Tile(own, 16 if wide or not has_much else 32, 8, 1 if wide else 2)
    own = tokens or (32 if wide else 128 if padded_dim <= 128 else 64)
    is_tight = padded_dim == 256 and not has_much
    if wide:
        return Tile(own, 16 if is_tight else 32, 8, 2)
    return Tile(own, 32, 8, 2) if is_tight else Tile(own, 64, 8 if own == 128 else 4, 3)


def decode_tile(padded_dim: int, item_bytes: int, fp8: bool = False) -> Tile:
    """Returns the tile of the kernel for rows with one new token each. The arguments are those of extend_tile."""
    best = DECODE.get((capability(), padded_dim, fp8)) if item_bytes == 2 else None
    if best is not None:
        return best
    row_bytes = padded_dim * item_bytes
    positions = 16 if row_bytes > 1024 else 32 if row_bytes > 256 else 64
    return Tile(1, positions, 4, 2 if item_bytes == 4 or padded_dim > 256 else 3)
