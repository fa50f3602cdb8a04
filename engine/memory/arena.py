"""The device's KV memory: all chunks in one address range, mapped once. Who owns which chunk is scheduler/batch's business.

A KV group whose blocks take B bytes sees the whole arena as blocks of B: block b is bytes [b*B, (b+1)*B). It may use the blocks
that lie wholly inside chunks it owns.
"""

from __future__ import annotations

import torch

from engine.memory.chunk_memory import ChunkMemory
from scheduler.batch.plan import IntArray


def arena_blocks(memory: ChunkMemory, block_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[num_blocks, *block_shape]: the arena as one KV group sees it; the last partial block is left out."""
    block_bytes = dtype.itemsize
    for extent in block_shape:
        block_bytes *= extent
    num_blocks = len(memory.arena) // block_bytes
    return memory.arena[: num_blocks * block_bytes].view(dtype).view(num_blocks, *block_shape)


def copy_pieces(arena: torch.Tensor, piece_bytes: int, sources: IntArray, targets: IntArray) -> None:
    """Copies piece sources[i] of an arena to targets[i]; no piece is both. On a GPU it comes after what was launched before."""
    pieces = arena[: len(arena) // piece_bytes * piece_bytes].view(-1, piece_bytes)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        pieces[target].copy_(pieces[source])
