"""Keeps one address range per model for its weights. The range is the same for every load, so that everything that holds the
address of a weight (a captured graph, a table) stays valid. From an eviction to the next load the range has no memory, on a GPU
from some milliseconds after the eviction. A wrong access to the weights in that time is a fault, and so cannot go unnoticed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from engine.memory.chunk_memory import ChunkMemory

PREPARING_LOCKS = 8  # most chunks prepared at a time; adjacent chunks have different locks


class WeightRange:
    """The address range of one model's weights, or of the KV of a split model. num_bytes: its size, which is rounded up to whole
    chunks of `memory`. Raises MemoryError if there is no address space."""

    def __init__(self, memory: ChunkMemory, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_chunks = -(-num_bytes // memory.chunk_bytes)
        self._memory = memory
        self._reserved_bytes = max(1, self.num_chunks) * memory.chunk_bytes
        self.address = memory.reserve(self._reserved_bytes)
        self._mapped = False
        self._chunks: Sequence[int] = ()
        self._preparing = [threading.Lock() for _ in range(PREPARING_LOCKS)]

    @cached_property
    def _all(self) -> torch.Tensor:
        """The whole range as a tensor, made when it is first used, which must be after `map`: torch asks the driver to which device
        an address belongs, and the driver knows only addresses with memory."""
        return self._memory.tensor(self.address, self.num_bytes)

    @property
    def buffer(self) -> Any:
        """The range's memory as a buffer into which files can be read. Only for devices whose memory the host can write."""
        return self._all.numpy().data

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = dtype.itemsize
        for extent in shape:
            num_bytes *= extent
        return self._all[offset_bytes : offset_bytes + num_bytes].view(dtype).view(shape)

    def map(self, chunks: Sequence[int]) -> None:
        """Maps the chunks into the range, in order; their content is undefined. Raises ValueError if there are not exactly
        num_chunks chunks, or if the range is already mapped. Raises MemoryError, and leaves the range unmapped, if the device
        refuses."""
        if len(chunks) != self.num_chunks or self._mapped:
            raise ValueError(f"{len(chunks)} chunks for a range of {self.num_chunks}{', mapped already' if self._mapped else ''}")
        self._memory.map(self.address, chunks)
        self._mapped, self._chunks = True, chunks

    def prepare(self, begin_bytes: int, end_bytes: int) -> None:
        """Makes the system provide the memory of the chunks with the bytes from begin_bytes to before end_bytes of a mapped range,
        in huge pages where possible. Several threads may call it at once; each call returns when the memory of its own bytes is
        ready."""
        size = self._memory.chunk_bytes
        for place in range(begin_bytes // size, -(-end_bytes // size)):
            with self._preparing[place % PREPARING_LOCKS]:
                self._memory.prepare(int(self._chunks[place]))

    def unmap(self) -> None:
        """Unmaps the chunks; the address range stays. Idempotent."""
        if self._mapped:
            self._mapped = False
            if self.num_chunks:
                self._memory.unmap(self.address, self.num_chunks * self._memory.chunk_bytes)

    def close(self) -> None:
        """Unmaps the chunks and returns the address range to the system."""
        self.unmap()
        self._memory.release(self.address, self._reserved_bytes)


class WeightRanges:
    """The weight ranges of all models of one device, kept by the models' names for the life of the process."""

    def __init__(self, memory: ChunkMemory) -> None:
        self._memory = memory
        self._ranges: dict[str, tuple[object, WeightRange]] = {}

    def of(self, model: str, identity: object, num_bytes: int) -> WeightRange:
        """Returns the unmapped address range for a model that is about to be loaded. If `identity` (a value that differs between
        different weights) and num_bytes are the same as at the model's last load, it is the same range; otherwise that range is
        released and a new one reserved. Raises MemoryError if there is no address space."""
        known = self._ranges.get(model)
        if known is not None:
            if known[0] == identity and known[1].num_bytes == num_bytes:
                return known[1]
            known[1].close()
            del self._ranges[model]
        made = WeightRange(self._memory, num_bytes)
        self._ranges[model] = (identity, made)
        return made
