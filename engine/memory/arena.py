"""Makes tensors through which a KV group reads and writes the arena. The arena is all chunks of a device in one address range,
mapped once. scheduler/batch decides which model owns which chunk.

A KV group whose blocks take B bytes sees the whole arena as blocks of B bytes: block b is bytes [b*B, (b+1)*B). The group may use
only the blocks that lie wholly inside chunks it owns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loader.shapes.kv_dtypes import kv_dtype_named
from loader.shapes.kv_layout import KVGroupSpec
from scheduler.batch.plan import IntArray


def kv_views(arena: Tensor, group: KVGroupSpec, token_dims: tuple[int, int, int], kv_dtype: str) -> tuple[Tensor, Tensor | None]:
    """Returns the arena (uint8) as one KV group sees it: keys and values [num_blocks, layers, 2, kv_heads, block_tokens, head_dim],
    and their scales [num_blocks, layers, 2, kv_heads, block_tokens] (None unless kv_dtype is fp8). token_dims: the sizes 2,
    kv_heads and head_dim of these shapes (kv_layout.group_token_dims). kv_dtype: fp8, or the name of a torch dtype.

    For fp8 both tensors are uint8: keys and values are codes of float8_e4m3fn, scales are powers of two, stored as exponents. A
    block holds its scales after its values, so a block that is copied, saved or shared can be read by itself."""
    num, kv_heads, head_dim = token_dims
    places = (len(group.layers), num, kv_heads, group.block_tokens)
    num_blocks = len(arena) // group.block_bytes
    blocks = arena[: num_blocks * group.block_bytes].view(num_blocks, group.block_bytes)
    if not kv_dtype_named(kv_dtype).scale_bytes:
        return blocks.view(getattr(torch, kv_dtype)).view(num_blocks, *places, head_dim), None
    num_values = math.prod(places) * head_dim
    return blocks[:, :num_values].unflatten(1, (*places, head_dim)), blocks[:, num_values:].unflatten(1, places)


def state_view(arena: Tensor, group: KVGroupSpec) -> Tensor:
    """Returns the arena (uint8) as a KV group of states sees it: float32 [num_blocks, layers, numbers in a layer's state]. The
    layers of such a group (linear attention) keep one state per sequence instead of keys and values of its tokens."""
    num_blocks = len(arena) // group.block_bytes
    return arena[: num_blocks * group.block_bytes].view(torch.float32).view(num_blocks, len(group.layers), -1)


def copy_pieces(arena: torch.Tensor, piece_bytes: int, sources: IntArray, targets: IntArray) -> None:
    """Copies piece sources[i] of an arena to piece targets[i], for all i; piece p is bytes [p * piece_bytes, (p + 1) *
    piece_bytes). No piece may be in both arrays. On a GPU the copies run after all work that was launched before."""
    pieces = arena[: len(arena) // piece_bytes * piece_bytes].view(-1, piece_bytes)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        pieces[target].copy_(pieces[source])
