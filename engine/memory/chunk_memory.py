"""Defines the interface between code that counts in chunks and the memory of one kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from scheduler.batch.plan import IntArray

if TYPE_CHECKING:  # engines of null models do not need torch
    from torch import Tensor

    from loader.sinks import Fence


class DeviceCopy(Protocol):
    """A copy under way between the host and a device. Until `wait` has returned or raised, its source must not change and its
    target must not be read."""

    def done(self) -> bool:
        """Returns whether `wait` would return, or raise, at once."""
        ...

    def wait(self) -> int:
        """Waits for the copy and returns the checksum of the copied bytes (host/checksum.py). Raises RuntimeError if the device
        failed."""
        ...


@dataclass(slots=True, frozen=True)
class EndedCopy:
    """A DeviceCopy that had already ended when it was returned, or that was not needed."""

    checksum: int

    def done(self) -> bool:
        return True

    def wait(self) -> int:
        return self.checksum


# (address on the device, uint8 array of the host)
Piece = tuple[int, Any]


class DeviceCopies(Protocol):
    """Copies of several pieces under way. The rules of DeviceCopy hold for each of them."""

    def done(self) -> bool: ...

    def wait(self) -> list[int]:
        """Waits for all copies and returns their checksums, in order. Raises RuntimeError if the device failed."""
        ...


@runtime_checkable
class CopiesSeveral(Protocol):
    """A ChunkMemory that can copy several pieces in one call, because the calling thread does its copies."""

    def copy_several(self, pieces: Sequence[Piece], out: bool) -> list[int]:
        """Copies each piece as copy_in does, or as copy_out does if `out`, and returns their checksums. Releases the GIL once for
        all of them."""
        ...


@runtime_checkable
class StartsSeveral(Protocol):
    """A ChunkMemory whose copies are done by the device, for which several pieces in one call cost little more than one."""

    def start_several(self, pieces: Sequence[Piece], out: bool) -> DeviceCopies:
        """Starts copying each piece as copy_in does, or as copy_out does if `out`. If it raises, no copy is under way."""
        ...


class ChunkMemory(Protocol):
    """All physical memory that holds a device's weights and KV: num_chunks chunks of chunk_bytes each, allocated once. Every chunk
    has a fixed place in the arena, one address range, and may also be mapped in one reservation. Addresses are the device's.

    CpuMemory and CudaMemory are the two implementations. Every method may be called from any thread. Only the owner of chunks (see
    scheduler/batch/chunk_pool.py) may pass them to a method."""

    @property
    def num_chunks(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def arena(self) -> Tensor:
        """The whole arena, uint8 [num_chunks * chunk_bytes]: chunk c is [c * chunk_bytes, (c + 1) * chunk_bytes)."""
        ...

    def reserve(self, num_bytes: int) -> int:
        """Reserves an address range without memory and returns its address. num_bytes: a whole number of chunks. Raises
        MemoryError."""
        ...

    def map(self, address: int, chunks: Sequence[int]) -> None:
        """Maps the chunks one after the other, from `address` on, inside a reservation. Raises MemoryError."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Unmaps the chunks in part of a reservation, which itself stays. No step may be using them. They may be mapped elsewhere
        as soon as this returns; a device may still show them at the old address for some milliseconds, but no longer than until
        that address is mapped again. Raises RuntimeError if the device failed."""
        ...

    def release(self, address: int, num_bytes: int) -> None:
        """Gives up a reservation in which nothing is mapped."""
        ...

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        """Returns the memory at an address as uint8 [num_bytes]. The tensor is valid while chunks are mapped there, and does not
        keep them mapped."""
        ...

    def copy_in(self, address: int, source: Any) -> DeviceCopy:
        """Starts copying host memory (uint8 array) to the device. address: aligned to 8 bytes."""
        ...

    def copy_out(self, address: int, target: Any) -> DeviceCopy:
        """Starts copying the device's memory, as the steps launched so far leave it, to host memory (uint8 array)."""
        ...

    def write(self, address: int, source: Any) -> None:
        """Starts a copy as copy_in does, but without a checksum. The copy has ended once a fence taken afterwards is passed."""
        ...

    def copying(self) -> AbstractContextManager[object]:
        """Returns a context. What the calling thread launches on the device inside it runs after every earlier `write`, and fences
        wait for it as for a `write`."""
        ...

    def fence(self) -> Fence | None:
        """Returns a fence after every `write` so far; None if they have all ended."""
        ...

    def prepare(self, chunk: int) -> int:
        """Makes the system provide a free chunk's memory, in huge pages where possible. Returns how many bytes of the chunk are in
        huge pages now."""
        ...

    def discard(self, first_chunk: int, num_chunks: int) -> None:
        """Gives the memory of free chunks back to the system. Does nothing for a device whose memory is not the system's."""
        ...

    def copy_within(self, piece_bytes: int, sources: IntArray, targets: IntArray) -> None:
        """Copies piece sources[i] of the arena to piece targets[i]; no piece is in both. Piece p is [p * piece_bytes, (p + 1) *
        piece_bytes)."""
        ...

    def checksum(self, address: int, num_bytes: int) -> int:
        """Returns the checksum (host/checksum.py) of the device's memory as the steps launched so far leave it. address: aligned to
        8 bytes."""
        ...

    def export(self) -> list[int]:
        """Returns file descriptors of all chunks, in order, which the caller closes (memory/handles.py). A memory made of these
        descriptors has the same chunks with their content, in this process or another, even after this process has died."""
        ...

    def close(self) -> None:
        """Ends all mappings; no tensor of this memory may be touched afterwards."""
        ...
