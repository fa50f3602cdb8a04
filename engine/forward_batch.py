"""What one forward pass computes, as arrays. Built once a step and passed down; nothing about a step is global, because several
models live in one process.

Shapes: R rows, T tokens of all rows end to end, N tokens left to paged attention, B blocks of the longest row, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contracts import BatchPlan, IntArray, LongArray, SequenceTable

# Rows with more new tokens than this gather their context and use matrix products; shorter ones read it block by block.
LONG_ROW_TOKENS = 16


@dataclass(slots=True)
class ForwardBatch:
    """kv [num_blocks, layers, 2, G, block_tokens, D] is the arena as this model sees it, kv_flat the same memory for kernels.

    num_tokens: T without padding · slots [T]: block * block_tokens + place of each token, -1 for padding · starts, num_new,
    contexts [R]: first token, tokens of this step, and positions stored after it · paged_* [N]: token, row and context of each
    query that reads its blocks directly · long_rows: the other rows · cos_sin [T, D] float32.
    """

    input_ids: Tensor  # [T] int64
    cos_sin: Tensor
    num_tokens: int
    kv: Tensor
    kv_flat: Any
    block_table: IntArray  # [R, B]
    slots: LongArray
    starts: IntArray
    num_new: IntArray
    contexts: IntArray
    paged_tokens: IntArray
    paged_rows: IntArray
    paged_contexts: IntArray
    long_rows: list[int]


def padded_rows(num_rows: int) -> int:
    """The next of few row counts: oneDNN builds a matrix product anew (0.3 to 2 ms) for every count it has not seen."""
    if num_rows <= 8:
        return num_rows
    step = 8 if num_rows <= 128 else 16 if num_rows <= 256 else 32
    return -(-num_rows // step) * step


def build_batch(
    plan: BatchPlan, table: SequenceTable, kv: Tensor, kv_flat: Any, inv_freq: Tensor, padded: bool = False
) -> ForwardBatch:
    """inv_freq [D / 2] float32; padded: T is one of few counts (the last tokens are not stored and attend to nothing). Work is per
    array, never per row."""
    block_tokens = kv.shape[4]
    num_new, first = plan.num_new, plan.num_computed
    num_rows = len(num_new)
    contexts = (first + num_new).astype(np.int32)
    num_blocks = -(-int(contexts.max()) // block_tokens)
    block_table = np.ascontiguousarray(table.block_table[plan.slots, :num_blocks])
    num_tokens = int(num_new.sum())
    long_rows: list[int] = []
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
        long_rows = np.flatnonzero(is_long).tolist()
        paged_tokens = np.flatnonzero(~is_long[rows]).astype(np.int32)
        paged_rows = rows[paged_tokens]
        paged_contexts = (positions[paged_tokens] + 1).astype(np.int32)
    input_ids = table.tokens[plan.slots[rows], positions].astype(np.int64)
    slots = block_table[rows, positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens
    if padded and (missing := padded_rows(num_tokens) - num_tokens):
        nothing = np.zeros(missing, np.int64)
        input_ids = np.concatenate((input_ids, nothing))
        positions = np.concatenate((positions, nothing))
        slots = np.concatenate((slots, nothing - 1))
    angles = torch.from_numpy(positions).float().unsqueeze(1) * inv_freq
    return ForwardBatch(
        input_ids=torch.from_numpy(input_ids),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=1),
        num_tokens=num_tokens,
        kv=kv,
        kv_flat=kv_flat,
        block_table=block_table,
        slots=slots,
        starts=starts,
        num_new=num_new,
        contexts=contexts,
        paged_tokens=paged_tokens,
        paged_rows=paged_rows,
        paged_contexts=paged_contexts,
        long_rows=long_rows,
    )
