"""The device's KV memory: all chunks in one address range, mapped once. Who owns which chunk is scheduler/batch's business.

A KV group whose blocks take B bytes sees the whole arena as blocks of B: block b is bytes [b*B, (b+1)*B). It may use the blocks
that lie wholly inside chunks it owns.
"""

from __future__ import annotations

import torch

from engine.memory.chunk_memory import ChunkMemory


def arena_blocks(memory: ChunkMemory, block_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[num_blocks, *block_shape]: the arena as one KV group sees it; the last partial block is left out."""
    block_bytes = dtype.itemsize
    for extent in block_shape:
        block_bytes *= extent
    num_blocks = len(memory.arena) // block_bytes
    return memory.arena[: num_blocks * block_bytes].view(dtype).view(num_blocks, *block_shape)
