"""The device's KV memory: all chunks in one address range, mapped once. Who owns which chunk is scheduler/batch's business.

A KV group whose blocks take B bytes sees the whole arena as blocks of B: block b is bytes [b*B, (b+1)*B). It may use the blocks
that lie wholly inside chunks it owns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loader.kv_layout import KV_FP8, KVGroupSpec
from scheduler.batch.plan import IntArray


def kv_views(arena: Tensor, group: KVGroupSpec, kv_heads: int, head_dim: int, kv_dtype: str) -> tuple[Tensor, Tensor | None]:
    """The arena (uint8) as one KV group sees it: keys and values [num_blocks, layers, 2, kv_heads, block_tokens, head_dim], and
    their scales [num_blocks, layers, 2, kv_heads, block_tokens].

    Only fp8 has scales; both are uint8 then, the codes of float8_e4m3fn and of their powers of two. They lie in one block, the
    scales behind the values, so whoever copies, saves or shares the block has what it takes to read it."""
    places = (len(group.layers), 2, kv_heads, group.block_tokens)
    num_blocks = len(arena) // group.block_bytes
    blocks = arena[: num_blocks * group.block_bytes].view(num_blocks, group.block_bytes)
    if kv_dtype != KV_FP8:
        return blocks.view(getattr(torch, kv_dtype)).view(num_blocks, *places, head_dim), None
    num_values = math.prod(places) * head_dim
    return blocks[:, :num_values].unflatten(1, (*places, head_dim)), blocks[:, num_values:].unflatten(1, places)


def copy_pieces(arena: torch.Tensor, piece_bytes: int, sources: IntArray, targets: IntArray) -> None:
    """Copies piece sources[i] of an arena to targets[i]; no piece is both. On a GPU it comes after what was launched before."""
    pieces = arena[: len(arena) // piece_bytes * piece_bytes].view(-1, piece_bytes)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        pieces[target].copy_(pieces[source])
