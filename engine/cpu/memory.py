"""The `cpu` device's chunks. They lie in one memfd, which is mapped as a whole as the arena, and chunk by chunk into the weight
ranges of models.

Kernels are as fast on a memfd that is mapped twice as on private memory (docs/performance.md). A chunk that is unmapped from a
weight range keeps its memory pages, so that they need not be created again for the next model."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from engine.host import checksum
from engine.memory import mappings
from engine.memory.arena import copy_pieces
from engine.memory.chunk_memory import EndedCopy, Piece
from loader.reading.sinks import Fence
from scheduler.batch.plan import IntArray


class CpuMemory:
    """Implements engine.memory.chunk_memory.ChunkMemory for the `cpu` device, on Linux. Only pages that were touched take physical
    memory. handles: descriptors that `export` of another CpuMemory has returned, to use the same chunks as that object; the caller
    closes them afterwards. (): new memory is made. Raises MemoryError if the system refuses memory, and ValueError if chunk_bytes
    is not a multiple of the page size, or if the handles belong to memory of another size."""

    def __init__(self, num_chunks: int, chunk_bytes: int, handles: Sequence[int] = ()) -> None:
        if chunk_bytes % mmap.PAGESIZE:
            raise ValueError(f"chunk_bytes {chunk_bytes} is not a multiple of the page size {mmap.PAGESIZE}")
        self.num_chunks, self.chunk_bytes = num_chunks, chunk_bytes
        self.num_bytes = num_chunks * chunk_bytes
        if handles and [os.fstat(fd).st_size for fd in handles] != [self.num_bytes]:
            raise ValueError(f"{len(handles)} handles that are not those of {num_chunks} chunks of {chunk_bytes} bytes")
        self._arena_address = mappings.reserve(self.num_bytes)
        self._fd = -1
        try:
            self._fd = os.dup(handles[0]) if handles else os.memfd_create("hearthd-chunks", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, self.num_bytes)
            mappings.map_file(self._arena_address, self.num_bytes, self._fd, 0)
        except (OSError, MemoryError) as error:
            if self._fd >= 0:
                os.close(self._fd)
            mappings.release(self._arena_address, self.num_bytes)
            why = error.strerror if isinstance(error, OSError) else error
            raise MemoryError(f"can't make {self.num_bytes} bytes of shared memory: {why}") from None
        self._is_huge, self._is_populated = np.zeros(num_chunks, np.bool_), np.zeros(num_chunks, np.bool_)
        self.arena = self.tensor(self._arena_address, self.num_bytes)

    def reserve(self, num_bytes: int) -> int:
        return mappings.reserve(num_bytes)

    def map(self, address: int, chunks: Sequence[int]) -> None:
        if len(chunks) and not 0 <= min(chunks) <= max(chunks) < self.num_chunks:
            raise IndexError(f"chunks {min(chunks)} to {max(chunks)} are not among the {self.num_chunks}")
        begin = 0
        for at in range(1, len(chunks) + 1):  # adjacent chunks are mapped in one call
            if at == len(chunks) or chunks[at] != chunks[at - 1] + 1:
                size, place = self.chunk_bytes, address + begin * self.chunk_bytes
                try:
                    mappings.map_file(place, (at - begin) * size, self._fd, int(chunks[begin]) * size)
                except MemoryError:  # the system may have taken the reservation of this part, too
                    self.unmap(address, len(chunks) * size)
                    raise
                begin = at

    def unmap(self, address: int, num_bytes: int) -> None:
        mappings.unmap(address, num_bytes)

    def release(self, address: int, num_bytes: int) -> None:
        mappings.release(address, num_bytes)

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.frombuffer(mappings.bytes_at(address, num_bytes), dtype=torch.uint8)

    def copy_in(self, address: int, source: Any) -> EndedCopy:
        return EndedCopy(checksum.copy(self._bytes_at(address, len(source)), source))

    def copy_out(self, address: int, target: Any) -> EndedCopy:
        return EndedCopy(checksum.copy(target, self._bytes_at(address, len(target))))

    def copy_several(self, pieces: Sequence[Piece], out: bool) -> list[int]:
        device = [address for address, _ in pieces]
        host = [held.__array_interface__["data"][0] for _, held in pieces]
        targets, sources = (host, device) if out else (device, host)
        sums = checksum.copy_each(targets, sources, [len(held) for _, held in pieces])
        if sums is None:
            copy = self.copy_out if out else self.copy_in
            return [copy(*piece).checksum for piece in pieces]
        return sums

    def write(self, address: int, source: Any) -> None:
        self._bytes_at(address, len(source))[:] = source

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def fence(self) -> Fence | None:
        return None

    @staticmethod
    def _bytes_at(address: int, num_bytes: int) -> Any:
        return np.frombuffer(mappings.bytes_at(address, num_bytes), np.uint8)

    def prepare(self, chunk: int) -> int:
        """Makes the system provide the physical memory of a chunk, except for pages that the chunk has already. Returns how many
        bytes of the chunk are in huge pages. A chunk keeps its pages until `discard`."""
        if self._is_huge[chunk]:
            return self.chunk_bytes
        address, huge_bytes = self._arena_address + chunk * self.chunk_bytes, 0
        if self.chunk_bytes % mappings.HUGE_PAGE_BYTES == 0:
            # reading a page of a memfd also gives it memory, and does no harm if the chunk is in use
            self.arena[chunk * self.chunk_bytes : (chunk + 1) * self.chunk_bytes : mappings.HUGE_PAGE_BYTES].sum()
            huge_bytes = mappings.collapse(address, self.chunk_bytes)
        self._is_huge[chunk] = huge_bytes == self.chunk_bytes
        if not self._is_huge[chunk] and not self._is_populated[chunk]:
            self._is_populated[chunk] = mappings.populate(address, self.chunk_bytes)
        return huge_bytes

    def discard(self, first_chunk: int, num_chunks: int) -> None:
        """Returns the memory of num_chunks free chunks, from first_chunk on, to the system; the chunks read as zeros afterwards.
        Raises IndexError for chunks that do not exist."""
        if not 0 <= first_chunk <= first_chunk + num_chunks <= self.num_chunks:
            raise IndexError(f"chunks {first_chunk}..{first_chunk + num_chunks} are outside the memory's {self.num_chunks}")
        mappings.punch_hole(self._fd, first_chunk * self.chunk_bytes, num_chunks * self.chunk_bytes)
        self._is_huge[first_chunk : first_chunk + num_chunks] = self._is_populated[first_chunk : first_chunk + num_chunks] = False

    def copy_within(self, piece_bytes: int, sources: IntArray, targets: IntArray) -> None:
        copy_pieces(self.arena, piece_bytes, sources, targets)

    def checksum(self, address: int, num_bytes: int) -> int:
        return checksum.of(self._bytes_at(address, num_bytes))

    def export(self) -> list[int]:
        return [os.dup(self._fd)]

    def close(self) -> None:
        mappings.release(self._arena_address, self.num_bytes)
        os.close(self._fd)
