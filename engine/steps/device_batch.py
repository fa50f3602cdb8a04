"""What one forward pass on a GPU computes: the counterpart of HostBatch (`forward_batch.py`), with every array on the device.

Shapes: R rows, T tokens, S slots of the model, B blocks a sequence may hold, P pairs of a head's dimensions that turn. Rows of one
new token come first: row r's token is token r for r below num_decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class DeviceGroup:
    """A step's view of one KV group. scales: of fp8 KV (engine/memory/arena.py); block_table [S, B] int32: the model's own, by
    slot; kv_slots [T] int64: block * block_tokens + place of each token, -1 for padding; turns [T, 2 P] float32; work: pieces of
    the decode rows' contexts (None: no such row)."""

    kv: Tensor
    scales: Tensor | None
    window_tokens: int
    block_table: Tensor
    kv_slots: Tensor
    turns: Tensor
    work: Any


@dataclass(slots=True)
class QueryTiles:
    """Tiles of the rows with several new tokens: rows, firsts [I] int32, as triton_extend takes them; starts, num_new [R]."""

    rows: Tensor
    firsts: Tensor
    starts: Tensor
    num_new: Tensor


@dataclass(slots=True)
class DeviceBatch:
    """slots, contexts [R] int32: each row's slot, and its positions after this step."""

    input_ids: Tensor  # [T]
    num_decode: int
    groups: list[DeviceGroup]
    layer_places: Sequence[tuple[int, int]]
    slots: Tensor
    contexts: Tensor
    tiles: QueryTiles | None

    def group_of(self, layer: int) -> tuple[DeviceGroup, int]:
        """A layer's KV group, and its place among the group's layers."""
        group, place = self.layer_places[layer]
        return self.groups[group], place
