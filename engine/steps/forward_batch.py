"""What one forward pass computes, as arrays. Built once a step and passed down; nothing about a step is global, because several
models live in one process.

Shapes: R rows, T tokens of all rows end to end, N tokens left to paged attention, B blocks of the longest row, D head size,
P pairs of a head's dimensions that turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contracts import BatchPlan, IntArray, LongArray, SequenceTable
from engine.steps.device_batch import DeviceBatch

# Rows with more new tokens than this are prompts, of which many tokens attend to a block at a time; others do so token by token.
LONG_ROW_TOKENS = 16


@dataclass(slots=True, frozen=True, eq=False)
class Rotary:
    """Rotary embedding of 2 P dimensions of each head. inv_freq [P] float32: angle per position; scale: of cosines and sines."""

    inv_freq: Tensor
    scale: float = 1.0


@dataclass(slots=True, frozen=True)
class GroupMemory:
    """kv [num_blocks, layers of the group, 2, G, block_tokens, D] is the arena as one KV group of a model sees it, kv_flat the same
    memory for kernels. rotary: of the group's layers. window_tokens: positions a query attends to, its own included; 0 for all.
    scales: of fp8 KV (engine/memory/arena.py)."""

    kv: Tensor
    kv_flat: Any
    rotary: Rotary
    window_tokens: int = 0
    scales: Tensor | None = None


@dataclass(slots=True)
class GroupBatch:
    """A step's view of one KV group. slots [T]: block * block_tokens + place of each token, -1 for padding. Entries of block_table
    behind the window of every query are -1 and must not be read. cos_sin [T, 2 P] float32."""

    kv: Tensor
    kv_flat: Any
    window_tokens: int
    block_table: IntArray  # [R, B]
    slots: LongArray
    cos_sin: Tensor
    scales: Tensor | None = None


@dataclass(slots=True)
class HostBatch:
    """On the CPU. groups: one for each KV group · layer_places: for each layer, its group and its place in that group.

    num_tokens: T without padding · starts, num_new,
    contexts [R]: first token, tokens of this step, and positions stored after it · paged_* [N]: token, row and context of each
    query that reads its blocks directly (context 0: padding; -1: one of the others) · has_long_rows: whether there may be others,
    of rows with more than LONG_ROW_TOKENS · attended [1]: positions that all of them attend to, at most.
    """

    input_ids: Tensor  # [T] int64
    num_tokens: int
    groups: list[GroupBatch]
    layer_places: Sequence[tuple[int, int]]
    starts: IntArray
    num_new: IntArray
    contexts: IntArray
    paged_tokens: IntArray
    paged_rows: IntArray
    paged_contexts: IntArray
    has_long_rows: bool
    attended: LongArray

    def group_of(self, layer: int) -> tuple[GroupBatch, int]:
        """A layer's KV group, and its place among the group's layers."""
        group, place = self.layer_places[layer]
        return self.groups[group], place


ForwardBatch = HostBatch | DeviceBatch


def padded_rows(num_rows: int) -> int:
    """The next of few row counts: oneDNN builds a matrix product anew (0.3 to 2 ms) for every count it has not seen."""
    if num_rows <= 8:
        return num_rows
    step = 8 if num_rows <= 128 else 16 if num_rows <= 256 else 32
    return -(-num_rows // step) * step


def build_batch(
    plan: BatchPlan,
    table: SequenceTable,
    memory: Sequence[GroupMemory],
    layer_places: Sequence[tuple[int, int]],
    cos_sin: Callable[[Rotary, IntArray], Tensor],
    padded: bool = False,
) -> HostBatch:
    """cos_sin: ops.cos_sin. padded: T is one of few counts (the last tokens are not stored and attend to nothing). Work is per
    array, never per row."""
    block_tokens = memory[0].kv.shape[4]
    num_new, first = plan.num_new, plan.num_computed
    num_rows = len(num_new)
    contexts = (first + num_new).astype(np.int32)
    num_blocks = -(-int(contexts.max()) // block_tokens)
    num_tokens = int(num_new.sum())
    has_long_rows = False
    if num_tokens == num_rows:
        starts = rows = np.arange(num_rows, dtype=np.int32)
        positions = first.astype(np.int64)
        paged_tokens, paged_rows, paged_contexts = rows, rows, contexts
    else:
        starts = np.zeros(num_rows, np.int32)
        np.cumsum(num_new[:-1], out=starts[1:])
        rows = np.repeat(np.arange(num_rows, dtype=np.int32), num_new)
        positions = np.arange(num_tokens, dtype=np.int64) + (first - starts).astype(np.int64)[rows]
        is_long = num_new > LONG_ROW_TOKENS
        has_long_rows = bool(is_long.any())
        paged_tokens = np.flatnonzero(~is_long[rows]).astype(np.int32)
        paged_rows = rows[paged_tokens]
        paged_contexts = (positions[paged_tokens] + 1).astype(np.int32)
    input_ids = table.tokens[plan.slots[rows], positions].astype(np.int64)
    missing = padded_rows(num_tokens) - num_tokens if padded else 0
    nothing = np.zeros(missing, np.int64)
    blocks, places = positions // block_tokens, positions % block_tokens
    padded_positions = np.concatenate((positions, nothing), dtype=np.int32, casting="same_kind")
    turns = {rotary: cos_sin(rotary, padded_positions) for rotary in {own.rotary for own in memory}}  # most groups share theirs
    groups = []
    for own, block_tables in zip(memory, table.block_tables, strict=True):
        block_table = np.ascontiguousarray(block_tables[plan.slots, :num_blocks])
        slots = block_table[rows, blocks].astype(np.int64) * block_tokens + places
        if missing:
            slots = np.concatenate((slots, nothing - 1))
        groups.append(GroupBatch(own.kv, own.kv_flat, own.window_tokens, block_table, slots, turns[own.rotary], own.scales))
    if missing:
        input_ids = np.concatenate((input_ids, nothing))
    return HostBatch(
        input_ids=torch.from_numpy(input_ids),
        num_tokens=num_tokens,
        groups=groups,
        layer_places=layer_places,
        starts=starts,
        num_new=num_new,
        contexts=contexts,
        paged_tokens=paged_tokens,
        paged_rows=paged_rows,
        paged_contexts=paged_contexts,
        has_long_rows=has_long_rows,
        attended=np.array([num_new.astype(np.int64) @ contexts]),
    )
