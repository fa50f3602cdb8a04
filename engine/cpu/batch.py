"""The inputs of one forward pass on the `cpu` device, as arrays. A step builds them once and passes them to the layers as an
argument. They are not global, because one process runs several models.

Shapes: R rows, T tokens of all rows one after the other, N tokens whose attention reads KV blocks query by query (paged attention),
B blocks of the longest row, D head size, P pairs of a head's dimensions that rotary embedding (RoPE) rotates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.ops.ops import BatchAdapters, Rotary
from scheduler.batch.plan import BatchPlan, IntArray, LongArray, SequenceTable

# Rows with more new tokens than this are prompts: many of their queries read a KV block together. Other rows read blocks query by
# query.
LONG_ROW_TOKENS = 16


@dataclass(slots=True, frozen=True)
class GroupMemory:
    """The memory of one KV group, with the settings that its layers have in common.
    kv [num_blocks, layers of the group, 2, G, block_tokens, D]: the arena, viewed as the KV blocks of this group, for G KV heads;
    in a group of states, float32 [num_blocks, layers, number of values of a state].
    kv_flat: the same memory as a flat array for kernels; empty for fp8 KV, which no CPU kernel reads.
    rotary: the rotary embedding of the group's layers.
    reach R: how far back a query attends (KVGroupSpec.reach). Above 0: to the last R positions; below 0: within its chunk of -R
    positions; 0: to all earlier positions.
    scales: the scales of fp8 KV (engine/memory/arena.py); None: the KV is not fp8."""

    kv: Tensor
    kv_flat: Any
    rotary: Rotary
    reach: int = 0
    scales: Tensor | None = None


@dataclass(slots=True)
class GroupBatch:
    """The inputs of a step for the layers of one KV group.
    kv, kv_flat, reach, scales: the group's memory and settings (GroupMemory).
    block_table [R, B]: the block numbers of each row; entries for blocks that have left the window of every query are -1 and must
    not be read.
    slots [T]: the place of each token in the KV memory, block * block_tokens + place in the block; -1 for padding.
    cos_sin [T, 2 P] float32: the cosines, then the sines, by which each token's pairs of dimensions are rotated."""

    kv: Tensor
    kv_flat: Any
    reach: int
    block_table: IntArray  # [R, B]
    slots: LongArray
    cos_sin: Tensor
    scales: Tensor | None = None


@dataclass(slots=True)
class HostBatch:
    """The inputs of one step on the CPU.

    num_tokens: the number of the step's tokens: T without padding. In a recorded step it is T with padding, because the step is run
    again with other numbers of tokens.
    groups: the inputs for each KV group.
    layer_places: for each layer that is computed, the index of its KV group and its index among the group's layers.
    starts, num_new, contexts [R]: each row's first token in the step, its number of tokens in the step, and its number of positions
    stored after the step.
    paged_tokens, paged_rows, paged_contexts [N]: the token, row and context (number of positions) of each query whose attention is
    computed by itself. A context of 0 marks padding. A context of -1 marks a query of a long row, whose queries are computed
    together instead.
    has_long_rows: whether there may be long rows, that is, rows with more than LONG_ROW_TOKENS tokens.
    attended [1]: an upper bound on the number of positions that all queries together attend to.
    layer_inputs: the additional inputs of the layers (per-layer embeddings, as in Gemma 4); None: the model has none.
    kept: memory for the hidden states that the model's predictor reads; None: there is no predictor, or it does not read this step.
    adapters: the LoRA adapters of the step's tokens; None: the step computes no adapters."""

    input_ids: Tensor  # [T] int64
    num_tokens: int
    groups: list[GroupBatch]
    layer_places: Mapping[int, tuple[int, int]]
    starts: IntArray
    num_new: IntArray
    contexts: IntArray
    paged_tokens: IntArray
    paged_rows: IntArray
    paged_contexts: IntArray
    has_long_rows: bool
    attended: LongArray
    layer_inputs: Tensor | None = None
    kept: list[Tensor] | None = None
    adapters: BatchAdapters | None = None

    @property
    def block_tokens(self) -> int:
        """The number of tokens of a block, the same in every KV group. It is read from the first group, which is never a group of
        states."""
        return int(self.groups[0].kv.shape[4])

    def group_of(self, layer: int) -> tuple[GroupBatch, int]:
        """Returns the inputs for a layer's KV group, and the layer's index among the group's layers."""
        group, place = self.layer_places[layer]
        return self.groups[group], place


def padded_rows(num_rows: int) -> int:
    """Returns the number of rows, num_rows or slightly more, to which a matrix of num_rows rows is padded. Only few different
    numbers are returned, because oneDNN prepares a matrix multiplication anew (0.3 to 2 ms) for every number of rows that it has
    not met before."""
    if num_rows <= 8:
        return num_rows
    step = 8 if num_rows <= 128 else 16 if num_rows <= 256 else 32
    return -(-num_rows // step) * step


def adapter_numbers(plan: BatchPlan, table: SequenceTable, num_tokens: int) -> IntArray:
    """Returns the adapter number of each token of a step, int32 [num_tokens]: -1 for tokens without an adapter, and for padding
    after the step's own tokens."""
    numbers = np.full(num_tokens, -1, np.int32)
    of_rows = table.adapter[plan.slots]
    of_tokens = of_rows if plan.all_decode else np.repeat(of_rows, plan.num_new)
    numbers[: len(of_tokens)] = of_tokens
    return numbers


def build_batch(
    plan: BatchPlan,
    table: SequenceTable,
    memory: Sequence[GroupMemory],
    layer_places: Mapping[int, tuple[int, int]],
    cos_sin: Callable[[Rotary, IntArray], Tensor],
    padded: bool = False,
    adapters: BatchAdapters | None = None,
) -> HostBatch:
    """Returns the inputs of a step, made from its plan and the sequence table. All computations work on whole arrays instead of
    single rows.
    memory: the memory of each KV group.
    layer_places: for each layer, the index of its KV group and its index among the group's layers.
    cos_sin(rotary, positions): returns the cosines and sines of a rotary embedding (CpuOps.cos_sin).
    padded: whether T is rounded up as padded_rows does; padding tokens are not stored and attend to nothing.
    adapters: the tables of the model's LoRA adapters, in which `numbers` is replaced by the adapters of this step's tokens; None:
    steps compute no adapters."""
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
    turns = {rotary: cos_sin(rotary, padded_positions) for rotary in {own.rotary for own in memory}}  # most groups share one
    groups = []
    for own, block_tables in zip(memory, table.block_tables, strict=True):
        block_table = np.ascontiguousarray(block_tables[plan.slots, :num_blocks])
        slots = block_table[rows, blocks].astype(np.int64) * block_tokens + places
        if missing:
            slots = np.concatenate((slots, nothing - 1))
        groups.append(GroupBatch(own.kv, own.kv_flat, own.reach, block_table, slots, turns[own.rotary], own.scales))
    if missing:
        input_ids = np.concatenate((input_ids, nothing))
    if adapters is not None:
        adapters = replace(adapters, numbers=adapter_numbers(plan, table, len(input_ids)))
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
        adapters=adapters,
    )
