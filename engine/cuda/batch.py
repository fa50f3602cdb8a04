"""The inputs of a forward pass on a GPU, with every array on the device. HostBatch (engine/cpu/batch.py) has the same inputs on a
host.

Shapes: R rows (one sequence's part of a step each), T tokens, S slots of the model, B blocks a sequence may hold, P pairs of a
head's dimensions that are rotated. Rows with one new token come first, so row r's token is token r for r below num_decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.ops.ops import BatchAdapters


@dataclass(slots=True)
class DeviceGroup:
    """The part of a step's inputs that belongs to one KV group (the layers that share block tables).

    kv: the arena as the group sees it (engine.memory.arena.kv_views); in a group of states float32 [num_blocks, layers, size of a
    state]. scales: the scales of fp8 KV; None: KV is not fp8.
    reach: how far back a token attends: above 0: to the last `reach` positions, its own included; below 0: within its own chunk of
    -reach adjacent positions (chunked attention); 0: to all.
    block_table [S + 1, B] int32: the blocks of each slot.
    kv_slots [T] int64: where each token is stored, block * block_tokens + place in the block; -1 for padding.
    turns [T, 2 P] float32: for each token the cosines, then the sines, of the rotary embedding.
    work: the split-K parts into which the decode rows' contexts are cut (triton_decode.DecodeWork); None: there are no decode
    rows."""

    kv: Tensor
    scales: Tensor | None
    reach: int
    block_table: Tensor
    kv_slots: Tensor
    turns: Tensor
    work: Any


@dataclass(slots=True)
class PromptRows:
    """The rows of a step as FlashAttention takes them (kernels/flash_attention.py). bounds [R + 1] int32: the index in the step of
    each row's first token, then T. num_new [R] int32: the row's number of new tokens, 0 if it is one."""

    bounds: Tensor
    num_new: Tensor


@dataclass(slots=True)
class QueryTiles:
    """The I tiles (groups of adjacent queries of one row) into which the rows with several new tokens are divided, as triton_extend
    takes them.

    rows [I] int32: each tile's row. firsts [I] int32: the index of its first query among the row's new tokens; at or above num_new
    in tiles that are padding.
    tokens: number of queries in a tile.
    starts, num_new [R]: the index in the step of each row's first token, and the row's number of new tokens.
    prompt_rows: set by the step's first layer that FlashAttention computes; None: there was none yet."""

    rows: Tensor
    firsts: Tensor
    tokens: int
    starts: Tensor
    num_new: Tensor
    prompt_rows: PromptRows | None = None


@dataclass(slots=True)
class DeviceAdapters(BatchAdapters):
    """The LoRA adapters of one step's tokens, as tensors on the device. bound: an upper bound of the LoRA ranks of all adapters."""

    bound: int


@dataclass(slots=True)
class DeviceBatch:
    """The inputs of one step on the device.

    num_decode: number of rows with one new token. In padded steps (engine/cuda/mixed_steps.py) it is an upper bound; the groups'
    `work` then has only the parts of the actual decode rows.
    groups: the inputs of each KV group. layer_places: for each layer that this device computes, the index of its group and its
    place in that group.
    slots, contexts [R] int32: each row's slot, and its number of positions stored after this step.
    firsts, starts [R]: each row's number of positions before this step, and the index of its first token in the step.
    token_rows [T]: the row of each token. tiles: the tiles of rows with several new tokens; None: there are none.
    layer_inputs: the inputs of layers that have inputs of their own, set by the model; None: there are none. kept: receives the
    states that the model's predictor reads; None: there is no predictor. adapters: the LoRA adapters of the step's tokens; None:
    the step computes none."""

    input_ids: Tensor  # [T]
    num_decode: int
    groups: list[DeviceGroup]
    layer_places: Mapping[int, tuple[int, int]]
    slots: Tensor
    contexts: Tensor
    tiles: QueryTiles | None
    token_rows: Tensor
    firsts: Tensor
    starts: Tensor
    layer_inputs: Tensor | None = None
    kept: list[Tensor] | None = None
    adapters: DeviceAdapters | None = None

    @property
    def block_tokens(self) -> int:
        """The number of tokens of a block, the same in every group. (The first group is never a group of states.)"""
        return int(self.groups[0].kv.shape[4])

    def group_of(self, layer: int) -> tuple[DeviceGroup, int]:
        """Returns the inputs of the KV group to which a layer belongs, and the layer's place among the layers of that group."""
        group, place = self.layer_places[layer]
        return self.groups[group], place
