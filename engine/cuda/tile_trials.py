"""Launches attention with a given tile at the sizes of a model, on keys and values that nobody reads: what tiles are measured with,
and what is compiled before they are.

A tile's speed depends on the head size and on the types of numbers. The group size (query heads of a KV head) changes a program
only beyond GROUP_ROWS, since smaller groups are padded to as many rows, and windows, caps and sinks change all tiles alike; so
models that differ in these alone share a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from engine.cuda.kernels import entry, tiles, triton_decode, triton_extend
from engine.cuda.kernels.tiles import DECODE_KERNEL, EXTEND_KERNEL, Entry, Tile
from engine.memory.arena import kv_views
from engine.protocol import LoadModel
from loader.shapes.kv_dtypes import KV_FP8, kv_dtype_named
from loader.shapes.kv_layout import KVGroupSpec
from loader.shapes.model_shape import ModelShape

GROUP_ROWS = 16  # rows of queries in a tile of decode attention, which tensor cores take
KV_BYTES = 64 << 20  # of keys and values of a trial, at most
DECODE_ROWS, DECODE_POSITIONS = 16, 2048  # sequences of a trial's decode step, and the most positions of each
PROMPT_TOKENS = 2048
PIECES_PER_CORE = 8


class Trial(NamedTuple):
    """The sizes at which tiles are compared. kernel: EXTEND_KERNEL or DECODE_KERNEL. dtype, kv_dtype: names of the types of the
    queries, and of keys and values."""

    kernel: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str
    block_tokens: int

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype == KV_FP8

    @property
    def item_bytes(self) -> int:
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def key(self) -> tuple[str, int, int, bool]:
        """What the trial decides, as the first four fields of tiles.MeasuredTile."""
        return self.kernel, tiles.padded(self.head_dim), self.item_bytes, self.is_fp8

    @property
    def entry(self) -> Entry:
        return tiles.entry_of(*self.key)

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles that are compared, the table's own first."""
        return self.entry.tile, *self.entry.others

    def __str__(self) -> str:
        what = "prompts" if self.kernel == EXTEND_KERNEL else "decode steps"
        over = " over fp8 KV" if self.is_fp8 else ""
        return f"{what} with heads of {tiles.padded(self.head_dim)} in {self.dtype}{over}"


def trials_of(spec: LoadModel, shape: ModelShape, block_tokens: int) -> list[Trial]:
    """Returns the trials that a model asks for: those of its attention for which the table has other tiles and none was measured.
    There are none for latent attention, whose tiles are its own, nor for groups of more than GROUP_ROWS heads. Where heads have
    several sizes, prompts are tried at the widest alone, because that decides the queries of all tiles."""
    if shape.latent is not None:
        return []
    found: dict[tuple[str, int, int, bool], Trial] = {}
    for heads in shape.kinds_of_heads:
        if shape.num_heads > GROUP_ROWS * heads.num_kv_heads:
            continue
        for kernel in (EXTEND_KERNEL, DECODE_KERNEL):
            if kernel == EXTEND_KERNEL and heads.head_dim != shape.widest_head_dim:
                continue
            sizes = (shape.num_heads, heads.num_kv_heads, heads.head_dim)
            trial = Trial(kernel, *sizes, spec.dtype, spec.kv_dtype, block_tokens)
            if trial.entry.others and not trial.entry.measured:
                found.setdefault(trial.key, trial)
    return list(found.values())


def launching(trial: Trial, device: torch.device | str, num_cores: int, compared: Sequence[Tile]) -> dict[Tile, Callable[[], None]]:
    """Returns for each of some tiles a function that launches the trial's attention with it, on the current stream. All inputs are
    made here, so that such a call copies nothing. num_cores: the GPU's number of multiprocessors."""
    dtype = getattr(torch, trial.dtype)
    num_blocks, block_bytes = _blocks(trial)
    group = KVGroupSpec("full", trial.block_tokens, block_bytes, (0,))
    arena = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device=device)
    kv = kv_views(arena, group, (2, trial.kv_heads, trial.head_dim), trial.kv_dtype)
    width, num_rows = (trial.heads + 2 * trial.kv_heads) * trial.head_dim, _num_rows(trial)
    num_tokens = PROMPT_TOKENS if trial.kernel == EXTEND_KERNEL else num_rows
    qkv = torch.zeros(num_tokens, width, dtype=dtype, device=device)
    out = torch.empty(num_tokens, trial.heads * trial.head_dim, dtype=dtype, device=device)
    table = torch.arange(num_blocks, dtype=torch.int32).view(num_rows, -1).to(device)
    rows = torch.arange(num_rows, dtype=torch.int32).to(device)
    num_positions = PROMPT_TOKENS if trial.kernel == EXTEND_KERNEL else table.shape[1] * trial.block_tokens
    contexts = torch.full((num_rows,), num_positions, dtype=torch.int32).to(device)
    how = (trial.head_dim**-0.5, 0.0, None, entry.INTERPRETED, out)
    calls: dict[Tile, Callable[[], None]] = {}
    if trial.kernel == DECODE_KERNEL:
        work = entry.split_contexts(contexts, 0, max(1, num_cores * PIECES_PER_CORE // trial.kv_heads))
        for tile in compared:
            calls[tile] = partial(
                _with_tile, tile, triton_decode.decode_attention, qkv, *kv, 0, trial.heads, table, rows, work, *how
            )
        return calls
    zeros = torch.zeros_like(rows)
    for tile in compared:
        firsts = torch.arange(0, PROMPT_TOKENS, tile.tokens, dtype=torch.int32).flip(0).to(device)  # as columns.extend_step has it
        columns = (table, rows, torch.zeros_like(firsts), firsts, tile.tokens, zeros, contexts, contexts, 0)
        calls[tile] = partial(_with_tile, tile, triton_extend.extend_attention, qkv, *kv, 0, trial.heads, *columns, *how)
    return calls


def _with_tile(tile: Tile, launch: Callable[..., None], *arguments: Any) -> None:
    with tiles.forced(tile):
        launch(*arguments)


def _num_rows(trial: Trial) -> int:
    return 1 if trial.kernel == EXTEND_KERNEL else DECODE_ROWS


def _blocks(trial: Trial) -> tuple[int, int]:
    """Returns the number of a trial's blocks, the same for each of its rows, and the bytes of a block."""
    block_bytes = 2 * trial.kv_heads * trial.block_tokens * kv_dtype_named(trial.kv_dtype).head_bytes(trial.head_dim)
    if trial.kernel == EXTEND_KERNEL:
        return -(-PROMPT_TOKENS // trial.block_tokens), block_bytes
    most = max(1, KV_BYTES // (block_bytes * DECODE_ROWS))
    return DECODE_ROWS * min(most, -(-DECODE_POSITIONS // trial.block_tokens)), block_bytes
