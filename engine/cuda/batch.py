"""The inputs of a forward pass on a GPU, the counterpart of HostBatch (engine/cpu/batch.py) with every array on the device.

Shapes: R rows, T tokens, S slots of the model, B blocks a sequence may hold, P pairs of a head's dimensions that are rotated. Rows
with one new token come first: row r's token is token r for r below num_decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.ops.ops import BatchAdapters


@dataclass(slots=True)
class DeviceGroup:
    """One KV group's part of a step's inputs. kv: the arena as the group sees it; in a group of states float32 [num_blocks, layers,
    size of a state]. scales: the scales of fp8 KV (engine/memory/arena.py). reach: KVGroupSpec.reach. block_table [S + 1, B] int32:
    the model's own, by slot. kv_slots [T] int64: block * block_tokens + place of each token, -1 for padding. turns [T, 2 P]
    float32: rotary cosines, then sines. work: the pieces into which the decode rows' contexts are cut (triton_decode.DecodeWork);
    None if there are no decode rows."""

    kv: Tensor
    scales: Tensor | None
    reach: int
    block_table: Tensor
    kv_slots: Tensor
    turns: Tensor
    work: Any


@dataclass(slots=True)
class QueryTiles:
    """The I query tiles of the rows with several new tokens, as triton_extend takes them. rows [I] int32: each tile's row. firsts
    [I] int32: its first query among the row's new tokens; at or above num_new in tiles that are padding. tokens: number of queries
    in a tile. starts, num_new [R]: each row's first token in the step, and its number of new tokens."""

    rows: Tensor
    firsts: Tensor
    tokens: int
    starts: Tensor
    num_new: Tensor


@dataclass(slots=True)
class DeviceAdapters(BatchAdapters):
    """The LoRA adapters of one step's tokens, as tensors on the device. bound: an upper bound of the ranks of all adapters."""

    bound: int


@dataclass(slots=True)
class DeviceBatch:
    """The inputs of one step. num_decode: number of rows with one new token; in padded steps (engine/cuda/mixed_steps.py) an upper
    bound, while the groups' `work` has the pieces of the actual decode rows. slots, contexts [R] int32: each row's slot, and its
    number of positions stored after this step. layer_places: for each layer that is computed here, its group and its place in that
    group. token_rows [T]: the row of each token. firsts, starts [R]: each row's number of positions before this step, and the index
    of its first token in the step. layer_inputs, adapters: as in StepBatch."""

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
        """The number of tokens of a block, the same in every group. (The first group never has states.)"""
        return int(self.groups[0].kv.shape[4])

    def group_of(self, layer: int) -> tuple[DeviceGroup, int]:
        """Returns a layer's KV group, and the layer's place among the group's layers."""
        group, place = self.layer_places[layer]
        return self.groups[group], place
