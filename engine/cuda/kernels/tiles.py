"""The table of tile sizes for the attention kernels. For each kind of GPU, head size and type of keys and values it has the tile
that is used, whether that tile was the fastest in a measurement or only chosen because it fits, and alternatives that might be
faster. `python -m benchmarks.gpu_tiles` measures on a GPU and prints rows of this table.

Where an entry names alternatives, an engine uses the tile that was measured to be the fastest on its own GPU
(engine/cuda/tile_choice.py), if there is one. Such tiles are set once (`use`), before the first kernel is launched. Within a
process the tile of a shape never changes, because CUDA graphs hold grids, and because another tile adds numbers up in another
order.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import triton


class Tile(NamedTuple):
    """The size of an attention kernel's tile.

    tokens: number of query tokens that a program computes; 1 in decode steps.
    positions: number of positions whose keys and values are read at a time.
    warps, stages: num_warps and num_stages of Triton's launch.
    joins: whether the decode kernel combines the split-K parts ("pieces") of a row itself, instead of leaving that to a second
    kernel (triton_decode.py). In the table only alternatives (Entry.others) have it, because it relies on the order in which a GPU
    makes writes to memory visible, and so must be tested on the GPU first.
    flash: the kind of prompts (flash_attention.kind) that FlashAttention computes where it can, and the kernel only what is left;
    "": none. The table has no such tile."""

    tokens: int
    positions: int
    warps: int
    stages: int
    joins: bool = False
    flash: str = ""

    @property
    def size(self) -> Tile:
        """The tile without `joins` and `flash`."""
        return self._replace(joins=False, flash="")


class Entry(NamedTuple):
    """A row of the table. measured: whether `tile` was the fastest of several sizes in a measurement on such a GPU; False: it was
    chosen because it fits into registers and shared memory. others: the alternatives with which an engine compares `tile`: if it
    was not measured, tiles of other sizes; in decode steps also every tile with `joins` set."""

    tile: Tile
    measured: bool
    others: tuple[Tile, ...] = ()


class Key(NamedTuple):
    """The case for which an entry of the table is used. architecture: as the function `architecture` returns it. head_dim: the head
    size, padded to a power of two from 64 to 512. item_bytes: size of one number of the queries, in bytes. fp8: whether keys and
    values are stored as FP8 codes."""

    architecture: int
    head_dim: int
    item_bytes: int
    fp8: bool


class MeasuredTile(NamedTuple):
    """The tile that was measured to be the fastest on this GPU in one case. kernel: EXTEND_KERNEL (prompts) or DECODE_KERNEL.
    group: in decode steps the number of query heads per KV head, which affects the time that combining split-K parts takes; 0 for
    prompts. head_dim: the head size, padded to a power of two. item_bytes: size of one number of the queries, in bytes. fp8:
    whether keys and values are stored as FP8 codes."""

    kernel: str
    head_dim: int
    item_bytes: int
    fp8: bool
    group: int
    tile: Tile

    @property
    def place(self) -> Place:
        return self[:5]


Place = tuple[str, int, int, bool, int]  # the fields of a MeasuredTile before `tile`: what one tile is chosen for
EXTEND_KERNEL, DECODE_KERNEL = "extend", "decode"
A100, ADA, HOPPER, B200, RTX50 = 80, 86, 90, 100, 120  # the architectures, by the compute capability that they begin with
HALF, FLOAT32 = 2, 4
PLAIN, FP8 = False, True
SMALLEST_HEAD, LARGEST_HEAD = 64, 512
# Shared memory that a program may have, by architecture. Source: NVIDIA, "CUDA C++ Programming Guide", technical specifications.
SHARED_BYTES = {A100: 163 << 10, ADA: 99 << 10, HOPPER: 227 << 10, B200: 227 << 10, RTX50: 99 << 10}
_ARCHITECTURES = {80: A100, 90: HOPPER, 100: B200, 103: B200, 120: RTX50, 121: RTX50}


def architecture(gpu: int) -> int:
    """Returns the architecture whose entries of the table are used on a GPU of this compute capability (90 for 9.0). A GPU that the
    table does not know, and interpreted kernels (0), use the entries of 8.6, which need the least shared memory."""
    return _ARCHITECTURES.get(gpu, ADA)


def _measured(tile: Tile) -> Entry:
    return Entry(tile, measured=True)


def _fits(tile: Tile, *others: Tile) -> Entry:
    return Entry(tile, measured=False, others=others)


def _or_joined(entry: Entry) -> Entry:
    """Returns the entry of a decode kernel with further alternatives: each of its tiles once more, with `joins` set."""
    return entry._replace(others=(*entry.others, *(tile._replace(joins=True) for tile in (entry.tile, *entry.others))))


_ARCHITECTURES_WITH_FP8 = (ADA, HOPPER, B200, RTX50)
_Shape = tuple[int, int, bool]  # the fields of a Key behind `architecture`


def _everywhere(entries: dict[_Shape, Entry]) -> dict[Key, Entry]:
    """Returns these entries, whose keys are (head_dim, item_bytes, fp8), for every architecture; those with FP8 codes only for
    architectures that support FP8."""
    return {
        Key(architecture, *shape): entry
        for shape, entry in entries.items()
        for architecture in (_ARCHITECTURES_WITH_FP8 if shape[2] else SHARED_BYTES)
    }


# Prompts. Entries that were not measured keep nothing on the stack, in the form that needs most registers, wherever a tile was
# found that does not; but Hopper's for heads of 512 keeps 208 bytes, since its matrix instructions take 64 queries, and those of
# float32 over fp8 some where heads have 512. Float32 has nothing to compare: it is for proving models, not for serving them.
EXTEND = _everywhere(
    {
        (64, FLOAT32, PLAIN): _fits(Tile(32, 32, 8, 2)),
        (128, FLOAT32, PLAIN): _fits(Tile(32, 16, 8, 2)),
        (256, FLOAT32, PLAIN): _fits(Tile(32, 16, 8, 2)),
        (512, FLOAT32, PLAIN): _fits(Tile(32, 16, 8, 1)),
        (64, FLOAT32, FP8): _fits(Tile(32, 32, 8, 2)),
        (128, FLOAT32, FP8): _fits(Tile(16, 16, 8, 2)),
        (256, FLOAT32, FP8): _fits(Tile(16, 16, 8, 1)),
        (512, FLOAT32, FP8): _fits(Tile(32, 16, 8, 1)),
    }
) | {
    Key(A100, 128, FLOAT32, PLAIN): _fits(Tile(16, 32, 8, 2)),
    Key(ADA, 128, FLOAT32, PLAIN): _fits(Tile(32, 32, 8, 2)),
    Key(ADA, 512, FLOAT32, PLAIN): _fits(Tile(16, 16, 8, 1)),
    Key(ADA, 512, FLOAT32, FP8): _fits(Tile(16, 16, 8, 1)),
    Key(A100, 64, HALF, PLAIN): _fits(Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 32, 8, 3)),
    Key(A100, 128, HALF, PLAIN): _fits(Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 64, 8, 3)),
    Key(A100, 256, HALF, PLAIN): _fits(Tile(64, 32, 8, 2), Tile(64, 32, 8, 3), Tile(32, 32, 4, 3)),
    Key(A100, 512, HALF, PLAIN): _fits(Tile(32, 32, 8, 2), Tile(32, 16, 8, 3), Tile(16, 32, 8, 2)),
    Key(ADA, 64, HALF, PLAIN): _fits(Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 32, 8, 3)),
    Key(ADA, 128, HALF, PLAIN): _fits(Tile(128, 32, 8, 3), Tile(64, 64, 8, 2), Tile(64, 32, 4, 3)),
    Key(ADA, 256, HALF, PLAIN): _fits(Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(32, 32, 4, 2)),
    Key(ADA, 512, HALF, PLAIN): _fits(Tile(32, 32, 8, 2), Tile(16, 32, 8, 2)),
    Key(ADA, 64, HALF, FP8): _fits(Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 64, 8, 3)),
    Key(ADA, 128, HALF, FP8): _fits(Tile(128, 32, 8, 3), Tile(64, 64, 8, 2), Tile(64, 32, 8, 3)),
    Key(ADA, 256, HALF, FP8): _fits(Tile(32, 32, 8, 2), Tile(32, 16, 8, 2)),
    Key(ADA, 512, HALF, FP8): _fits(Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
    Key(HOPPER, 64, HALF, PLAIN): _measured(Tile(128, 64, 8, 3)),
    Key(HOPPER, 128, HALF, PLAIN): _measured(Tile(128, 128, 8, 2)),
    Key(HOPPER, 256, HALF, PLAIN): _measured(Tile(128, 64, 8, 2)),
    Key(HOPPER, 512, HALF, PLAIN): _fits(Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(32, 32, 8, 2)),
    Key(HOPPER, 64, HALF, FP8): _fits(Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
    Key(HOPPER, 128, HALF, FP8): _measured(Tile(128, 128, 8, 3)),
    Key(HOPPER, 256, HALF, FP8): _fits(Tile(64, 32, 8, 2), Tile(64, 32, 4, 2), Tile(128, 64, 8, 3)),
    Key(HOPPER, 512, HALF, FP8): _fits(Tile(16, 32, 8, 2), Tile(64, 16, 8, 2), Tile(64, 32, 8, 2)),
    Key(B200, 64, HALF, PLAIN): _fits(Tile(128, 32, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
    Key(B200, 128, HALF, PLAIN): _fits(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 8, 3)),
    Key(B200, 256, HALF, PLAIN): _fits(Tile(64, 64, 8, 3), Tile(128, 32, 8, 2), Tile(64, 32, 8, 3)),
    Key(B200, 512, HALF, PLAIN): _fits(Tile(64, 16, 8, 2), Tile(32, 32, 8, 2)),
    Key(B200, 64, HALF, FP8): _fits(Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
    Key(B200, 128, HALF, FP8): _fits(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 8, 3)),
    Key(B200, 256, HALF, FP8): _fits(Tile(64, 64, 8, 3), Tile(64, 32, 8, 3)),
    Key(B200, 512, HALF, FP8): _fits(Tile(16, 32, 8, 2), Tile(64, 16, 8, 2)),
    Key(RTX50, 64, HALF, PLAIN): _fits(Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 32, 8, 3)),
    Key(RTX50, 128, HALF, PLAIN): _fits(Tile(64, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 32, 4, 3)),
    Key(RTX50, 256, HALF, PLAIN): _fits(Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(32, 32, 4, 2)),
    Key(RTX50, 512, HALF, PLAIN): _fits(Tile(32, 16, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 8, 2)),
    Key(RTX50, 64, HALF, FP8): _fits(Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 64, 8, 3)),
    Key(RTX50, 128, HALF, FP8): _fits(Tile(64, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 32, 8, 3)),
    Key(RTX50, 256, HALF, FP8): _fits(Tile(32, 32, 8, 2), Tile(32, 16, 8, 2)),
    Key(RTX50, 512, HALF, FP8): _fits(Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
}
# Decode steps. Each tile for half precision is also tried in the form that joins pieces.
DECODE = _everywhere(
    {
        (64, HALF, PLAIN): _or_joined(_fits(Tile(1, 64, 4, 3), Tile(1, 128, 4, 3), Tile(1, 64, 2, 3))),
        (128, HALF, PLAIN): _or_joined(_fits(Tile(1, 64, 4, 3), Tile(1, 128, 4, 3), Tile(1, 32, 4, 3))),
        (256, HALF, PLAIN): _or_joined(_fits(Tile(1, 32, 4, 3), Tile(1, 64, 8, 2), Tile(1, 32, 4, 2))),
        (512, HALF, PLAIN): _or_joined(_fits(Tile(1, 32, 4, 2), Tile(1, 32, 8, 2), Tile(1, 16, 4, 2))),
        (64, HALF, FP8): _or_joined(_fits(Tile(1, 64, 4, 3), Tile(1, 128, 4, 3), Tile(1, 64, 4, 2))),
        (128, HALF, FP8): _or_joined(_fits(Tile(1, 64, 4, 3), Tile(1, 128, 4, 3), Tile(1, 64, 4, 2))),
        (256, HALF, FP8): _or_joined(_fits(Tile(1, 32, 4, 3), Tile(1, 64, 8, 2), Tile(1, 32, 4, 2))),
        (512, HALF, FP8): _or_joined(_fits(Tile(1, 32, 4, 2), Tile(1, 32, 8, 2), Tile(1, 16, 4, 2))),
        (64, FLOAT32, PLAIN): _fits(Tile(1, 64, 4, 2)),
        (128, FLOAT32, PLAIN): _fits(Tile(1, 32, 8, 2)),
        (256, FLOAT32, PLAIN): _fits(Tile(1, 16, 8, 2)),
        (512, FLOAT32, PLAIN): _fits(Tile(1, 16, 4, 2)),
        (64, FLOAT32, FP8): _fits(Tile(1, 32, 8, 2)),
        (128, FLOAT32, FP8): _fits(Tile(1, 16, 8, 2)),
        (256, FLOAT32, FP8): _fits(Tile(1, 16, 8, 1)),
        (512, FLOAT32, FP8): _fits(Tile(1, 16, 8, 1)),
    }
) | {
    Key(HOPPER, 128, HALF, PLAIN): _or_joined(_measured(Tile(1, 64, 4, 3))),
    Key(HOPPER, 128, HALF, FP8): _or_joined(_measured(Tile(1, 128, 4, 3))),
}
TABLES = {EXTEND_KERNEL: EXTEND, DECODE_KERNEL: DECODE}


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


def entry_of(kernel: str, head_dim: int, item_bytes: int, fp8: bool, gpu: int | None = None) -> Entry:
    """Returns the table's entry for attention of one kind. kernel: EXTEND_KERNEL or DECODE_KERNEL. head_dim: the head size, up to
    512. item_bytes, fp8: as in Key. gpu: a compute capability (90 for 9.0); None: that of this process's GPU."""
    key = Key(architecture(capability() if gpu is None else gpu), padded(head_dim), item_bytes, fp8)
    entry = TABLES[kernel].get(key)
    if entry is None:  # FP8 codes on a GPU that does not convert them, whose models are refused, or interpreted
        entry = TABLES[kernel][key._replace(architecture=RTX50)]
    return entry


def padded(head_dim: int) -> int:
    """Returns the head size under which the table lists heads of size head_dim: the next power of two, but at least 64 and at most
    512."""
    return min(max(SMALLEST_HEAD, 1 << (head_dim - 1).bit_length()), LARGEST_HEAD)


class _Forced(threading.local):
    tile: Tile | None = None


_forced = _Forced()
_in_use: dict[Place, Tile] = {}


def use(chosen: Iterable[MeasuredTile]) -> None:
    """Sets the tiles that this process uses instead of those of the table. Tiles of an earlier call are forgotten. Called before
    the first launch of attention."""
    _in_use.clear()
    _in_use.update((one.place, one.tile) for one in chosen)
    _own_tile.cache_clear()


def in_use() -> list[MeasuredTile]:
    """Returns the tiles that the last call of `use` has set."""
    return [MeasuredTile(*key, tile) for key, tile in _in_use.items()]


def joins_pieces() -> bool:
    """Returns whether decode attention may use a tile with `joins` set: one that `use` has set, or the one that `forced` has set
    for this thread."""
    return any(tile.joins for tile in _in_use.values()) or (_forced.tile is not None and _forced.tile.joins)


@contextmanager
def forced(tile: Tile) -> Iterator[None]:
    """Returns a context in which all attention that this thread launches uses this tile."""
    _forced.tile = tile
    try:
        yield
    finally:
        _forced.tile = None


@functools.cache
def _own_tile(kernel: str, gpu: int, head_dim: int, item_bytes: int, fp8: bool, group: int) -> Tile:
    chosen = _in_use.get((kernel, padded(head_dim), item_bytes, fp8, group))
    return entry_of(kernel, head_dim, item_bytes, fp8, gpu).tile if chosen is None else chosen


def extend_tile(head_dim: int, item_bytes: int, fp8: bool = False) -> Tile:
    """Returns the tile of the kernel for rows with several new tokens. head_dim: the head size. item_bytes: size of one number of
    the queries, in bytes. fp8: whether KV is stored as FP8 codes."""
    return _forced.tile or _own_tile(EXTEND_KERNEL, capability(), head_dim, item_bytes, fp8, 0)


def decode_tile(head_dim: int, item_bytes: int, fp8: bool = False, group: int = 1) -> Tile:
    """Returns the tile of the kernel for rows with one new token each. head_dim: the head size. item_bytes: size of one number of
    the queries, in bytes. fp8: whether KV is stored as FP8 codes. group: number of query heads per KV head."""
    return _forced.tile or _own_tile(DECODE_KERNEL, capability(), head_dim, item_bytes, fp8, group)


def step_tokens(head_dims: Iterable[int], item_bytes: int, fp8: bool) -> int:
    """Returns the number of queries in each tile of a model's steps. Tiles are made once for all layers, so this is the largest
    number that a program computes at any of the head sizes. Such numbers are powers of two, so programs that compute fewer queries
    divide a tile evenly. item_bytes, fp8: as in extend_tile."""
    return max(extend_tile(head_dim, item_bytes, fp8).tokens for head_dim in head_dims)
