"""Defines ChunkMemory, the interface to the memory of a device of any kind, for code that counts memory in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from scheduler.batch.plan import IntArray

if TYPE_CHECKING:  # engines of null models do not need torch
    from torch import Tensor

    from loader.reading.sinks import Fence


class DeviceUnusable(RuntimeError):
    """Raised when it is not known any more what a device's memory shows at which addresses, so that only a new process can use the
    device."""


class DeviceCopy(Protocol):
    """A copy between the host and a device that may still be under way. Until `wait` has returned or raised an error, the source of
    the copy must not change and its target must not be read."""

    def done(self) -> bool:
        """Returns whether the copy has ended or failed; `wait` then does not block."""
        ...

    def wait(self) -> int:
        """Waits for the copy and returns the checksum of the copied bytes (engine/host/checksum.py). Raises RuntimeError if the
        device failed."""
        ...


@dataclass(slots=True, frozen=True)
class EndedCopy:
    """A DeviceCopy that has ended already when it is returned. checksum: the checksum of the copied bytes."""

    checksum: int

    def done(self) -> bool:
        return True

    def wait(self) -> int:
        return self.checksum


# (address on the device, uint8 array of the host)
Piece = tuple[int, Any]


class DeviceCopies(Protocol):
    """Copies of several pieces (each an address on the device and an array of the host) that were started together. Until `wait`
    has returned or raised an error, no source may change and no target may be read."""

    def done(self) -> bool: ...

    def wait(self) -> list[int]:
        """Waits for all copies and returns the checksums of the copied bytes, one for each piece, in order. Raises RuntimeError if
        the device failed."""
        ...


@runtime_checkable
class CopiesSeveral(Protocol):
    """A ChunkMemory that can copy several pieces in one call, during which the calling thread does the copying."""

    def copy_several(self, pieces: Sequence[Piece], out: bool) -> list[int]:
        """Copies each piece (an address on the device and an array of the host) and returns the pieces' checksums, in order. out:
        False: copies from the host to the device; True: from the device to the host. The GIL is released once for all pieces."""
        ...


@runtime_checkable
class StartsSeveral(Protocol):
    """A ChunkMemory whose copies are made by the device itself, so that starting several of them in one call takes little longer
    than starting one."""

    def start_several(self, pieces: Sequence[Piece], out: bool) -> DeviceCopies:
        """Starts copying each piece (an address on the device and an array of the host). out: False: copies from the host to the
        device; True: from the device to the host. If it raises, no copy is under way."""
        ...


class ChunkMemory(Protocol):
    """All physical memory that holds a device's weights and KV: num_chunks chunks of chunk_bytes each, allocated once. Each chunk
    has a fixed place in the arena, which is one address range, and may also be mapped at one place in a reserved range. Addresses
    are the device's.

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
        """Reserves an address range without memory and returns its address. num_bytes: a whole number of chunks. Raises MemoryError
        if there is no address space."""
        ...

    def map(self, address: int, chunks: Sequence[int]) -> None:
        """Maps the chunks one after the other into a range that `reserve` returned, from `address` on. Raises MemoryError if the
        device refuses; nothing is mapped there then."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Unmaps the chunks in num_bytes bytes of a reserved range, from `address` on; the range itself stays reserved. No step may
        be using the chunks there. They may be mapped elsewhere as soon as this returns. A device may still show them at the old
        address for some milliseconds, but no longer than until something is mapped there again. Raises RuntimeError if the device
        failed; DeviceUnusable is one."""
        ...

    def release(self, address: int, num_bytes: int) -> None:
        """Returns an address range that `reserve` returned to the system. Nothing may be mapped in it. num_bytes: the size with
        which it was reserved."""
        ...

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        """Returns the memory at an address as uint8 [num_bytes]. The tensor is valid while chunks are mapped there, and does not
        keep them mapped."""
        ...

    def copy_in(self, address: int, source: Any) -> DeviceCopy:
        """Starts copying host memory (`source`, a uint8 array) to the device's memory at `address`, which must be a multiple of 8.
        Returns the DeviceCopy, for which the caller must wait."""
        ...

    def copy_out(self, address: int, target: Any) -> DeviceCopy:
        """Starts copying the device's memory from `address` on to host memory (`target`, a uint8 array, which is filled). Copies
        the content that the memory has after the steps launched so far. Returns the DeviceCopy, for which the caller must wait."""
        ...

    def write(self, address: int, source: Any) -> None:
        """Starts copying `source` (uint8 array) to the device's memory at `address`, without a checksum. The copy has ended once a
        fence (an object that can be waited for) is passed that `fence` returned after this call."""
        ...

    def copying(self) -> AbstractContextManager[object]:
        """Returns a context manager for a thread that launches work on the device, such as the decoding of weights. Work launched
        in the context runs after every earlier `write`, and a later fence (see `fence`) also covers this work."""
        ...

    def fence(self) -> Fence | None:
        """Returns a fence (an object that can be waited for) that is passed when every `write` so far has ended; None: they have
        ended already."""
        ...

    def prepare(self, chunk: int) -> int:
        """Makes the system provide a chunk's physical memory now, in huge pages where possible; the chunk's content is kept.
        Returns how many bytes of the chunk are then in huge pages."""
        ...

    def discard(self, first_chunk: int, num_chunks: int) -> None:
        """Returns the memory of num_chunks free chunks, from first_chunk on, to the system; their content is lost. Does nothing on
        devices whose memory does not belong to the system, such as GPUs."""
        ...

    def copy_within(self, piece_bytes: int, sources: IntArray, targets: IntArray) -> None:
        """Copies piece sources[i] of the arena to piece targets[i], for all i. Piece p is bytes [p * piece_bytes, (p + 1) *
        piece_bytes). No piece may be in both arrays."""
        ...

    def checksum(self, address: int, num_bytes: int) -> int:
        """Returns the checksum (engine/host/checksum.py) of num_bytes bytes of the device's memory, from `address` (a multiple of
        8) on, with the content after the steps launched so far."""
        ...

    def export(self) -> list[int]:
        """Returns file descriptors that together stand for all chunks; the caller closes them (engine/memory/handles.py). A
        ChunkMemory made from these descriptors has the same chunks with their content, in this process or another, even after this
        process has died."""
        ...

    def close(self) -> None:
        """Ends this object's use of the memory and unmaps the arena. No tensor of this memory may be touched afterwards."""
        ...
