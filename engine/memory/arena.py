"""The device's KV memory: all chunks in one address range, mapped once. Who owns which chunk is scheduler/batch's business.

A KV group whose blocks take B bytes sees the whole arena as blocks of B: block b is bytes [b*B, (b+1)*B). It may use the blocks
that lie wholly inside chunks it owns.
"""

from __future__ import annotations

import mmap

import torch

# Linux's value; Python's mmap has no name for it. Untouched chunks cost no memory and no commit charge.
MAP_NORESERVE = 0x4000


def anonymous_map(num_bytes: int) -> mmap.mmap:
    """Private zeroed memory, backed by huge pages where the system allows it. Raises MemoryError."""
    try:
        mapped = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        raise MemoryError(f"can't map {num_bytes} bytes: {error.strerror}") from None
    mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def blocks_of_chunks(first_chunk: int, num_chunks: int, chunk_bytes: int, block_bytes: int) -> range:
    """Blocks of `block_bytes` that lie wholly inside chunks [first_chunk, first_chunk + num_chunks)."""
    begin = -(-first_chunk * chunk_bytes // block_bytes)
    end = (first_chunk + num_chunks) * chunk_bytes // block_bytes
    return range(begin, max(begin, end))


class KVArena:
    """num_chunks chunks of chunk_bytes each. `memory` is the whole of it as uint8; pages exist once touched."""

    def __init__(self, num_chunks: int, chunk_bytes: int) -> None:
        if chunk_bytes % mmap.PAGESIZE:
            raise ValueError(f"chunk_bytes {chunk_bytes} is not a multiple of the page size {mmap.PAGESIZE}")
        self.num_chunks, self.chunk_bytes = num_chunks, chunk_bytes
        self.num_bytes = num_chunks * chunk_bytes
        self._map = anonymous_map(self.num_bytes)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8, count=self.num_bytes)

    def blocks(self, block_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """[num_blocks, *block_shape]: the arena as one KV group sees it; the last partial block is left out."""
        block_bytes = dtype.itemsize
        for extent in block_shape:
            block_bytes *= extent
        num_blocks = self.num_bytes // block_bytes
        return self.memory[: num_blocks * block_bytes].view(dtype).view(num_blocks, *block_shape)

    def discard(self, chunk: int, num_chunks: int = 1) -> None:
        """Gives the chunks' pages back to the system; they read as zeros afterwards."""
        if not 0 <= chunk <= chunk + num_chunks <= self.num_chunks:
            raise IndexError(f"chunks {chunk}..{chunk + num_chunks} are outside the arena's {self.num_chunks}")
        self._map.madvise(mmap.MADV_DONTNEED, chunk * self.chunk_bytes, num_chunks * self.chunk_bytes)

    def close(self) -> None:
        """Unmaps everything; views must not be touched afterwards."""
        self._map.close()
