"""Which chunks of a device's arena are free, and how many the models may draw beyond what is theirs for good.

A model owns its reserved chunks from load to eviction. Whatever it needs beyond them it draws from the engine's lease, which all
models share: `num_drawn <= lease_chunks` holds after every call, except between `set_lease` and the reclaim that follows it.
"""

from __future__ import annotations

import numpy as np

from scheduler.batch.plan import BoolArray, IntArray


class ChunkPool:
    """num_chunks chunks of chunk_bytes each. Bookkeeping only: no memory is touched here."""

    def __init__(self, num_chunks: int, chunk_bytes: int, lease_chunks: int = 0) -> None:
        if num_chunks <= 0 or chunk_bytes <= 0:
            raise ValueError(f"num_chunks {num_chunks} and chunk_bytes {chunk_bytes} must be positive")
        self.num_chunks = num_chunks
        self.chunk_bytes = chunk_bytes
        self.lease_chunks = lease_chunks
        self.free: BoolArray = np.ones(num_chunks, np.bool_)
        self.num_reserved = 0
        self.num_drawn = 0
        # Counts everything that may let a waiting request in: a freed block, a returned chunk, a larger lease.
        self.version = 0
        # Chunks that were used and are free now: their physical memory is still there until the arena discards it.
        self._dirty: BoolArray = np.zeros(num_chunks, np.bool_)

    @property
    def room_chunks(self) -> int:
        """How many chunks may still be drawn."""
        return self.lease_chunks - self.num_drawn

    def set_lease(self, lease_chunks: int) -> None:
        """Negative `room_chunks` afterwards means that models must give chunks back."""
        if lease_chunks < 0:
            raise ValueError(f"lease_chunks {lease_chunks} is negative")
        self.lease_chunks = lease_chunks
        self.version += 1

    def take(self, chunks: IntArray, *, reserved: bool) -> None:
        """Marks free chunks as owned. Raises ValueError if one is not free or the lease does not cover them."""
        if not self.free[chunks].all():
            raise ValueError("a chunk was taken twice")
        if not reserved and len(chunks) > self.room_chunks:
            raise ValueError(f"lease: {len(chunks)} chunks asked, {self.room_chunks} left of {self.lease_chunks}")
        self.free[chunks] = False
        self._dirty[chunks] = False
        if reserved:
            self.num_reserved += len(chunks)
        else:
            self.num_drawn += len(chunks)

    def give_back(self, chunks: IntArray, *, reserved: bool, touched: bool = True) -> None:
        """touched: False for chunks taken a moment ago and not used. Raises ValueError if one is free already."""
        if self.free[chunks].any():
            raise ValueError("a chunk was given back twice")
        self.free[chunks] = True
        if reserved:
            self.num_reserved -= len(chunks)
        else:
            self.num_drawn -= len(chunks)
        if touched:
            self._dirty[chunks] = True
            self.version += 1

    def take_discards(self) -> list[tuple[int, int]]:
        """Runs (first chunk, number) of free chunks whose memory shall go back to the system. Each run is told once.

        Chunks come back only under pressure (eviction, a smaller lease, another model's need): none is kept for reuse."""
        if not self._dirty.any():
            return []
        runs = free_runs(self._dirty)
        self._dirty[:] = False
        return [(int(first), int(length)) for first, length in runs]


def free_runs(free: BoolArray) -> IntArray:
    """[N, 2] int32: (first, length) of each run of True, ascending."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).astype(np.int8)))
    firsts, ends = edges[0::2], edges[1::2]
    return np.stack((firsts, ends - firsts), axis=1).astype(np.int32)
