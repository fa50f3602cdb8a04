"""The seam between what is counted in chunks and the memory of a kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from scheduler.batch.plan import IntArray

if TYPE_CHECKING:  # engines of null models have no use for torch
    from torch import Tensor

    from loader.sinks import Fence


class Copy(Protocol):
    """Under way between the host and a device. Until `wait` has returned or raised, its source stays as it is and nobody reads its
    target."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        ...

    def wait(self) -> int:
        """The checksum of what was copied (memory/checksum.py). Raises RuntimeError if the device failed."""
        ...


@dataclass(slots=True, frozen=True)
class Copied:
    """A Copy that was over when it was started, or that there was no need to make."""

    checksum: int

    def done(self) -> bool:
        return True

    def wait(self) -> int:
        return self.checksum


# (address on the device, uint8 array of the host)
Piece = tuple[int, Any]


@runtime_checkable
class CopiesSeveral(Protocol):
    """A ChunkMemory to and from which the calling thread copies by itself."""

    def copy_several(self, pieces: Sequence[Piece], out: bool) -> list[int]:
        """As copy_in of each piece, or copy_out; their checksums. The interpreter is let go once for all of them."""
        ...


class ChunkMemory(Protocol):
    """All physical memory that a device's weights and KV draw on: num_chunks chunks of chunk_bytes each, made once. Every chunk has
    a fixed place in the arena, one address range; a chunk may be mapped into one reservation beside it. Addresses are the device's.

    CpuMemory and CudaMemory are the two implementations. Every call may come from any thread; those that take chunks are for their
    owner (scheduler/batch/chunk_pool.py says who that is).
    """

    @property
    def num_chunks(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def arena(self) -> Tensor:
        """uint8 [num_chunks * chunk_bytes]: chunk c is [c * chunk_bytes, (c + 1) * chunk_bytes)."""
        ...

    def reserve(self, num_bytes: int) -> int:
        """An address range without memory, of whole chunks. Raises MemoryError."""
        ...

    def map(self, address: int, chunks: Sequence[int]) -> None:
        """The chunks, one after the other, from `address` on, which lies in a reservation. Raises MemoryError."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Takes the chunks out of a reservation, which stays; nothing may be running on them."""
        ...

    def release(self, address: int, num_bytes: int) -> None:
        """Ends an unmapped reservation."""
        ...

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] at an address with chunks behind it, valid whenever it has some. It keeps nothing alive."""
        ...

    def copy_in(self, address: int, source: Any) -> Copy:
        """Starts copying host memory (uint8 array) to the device. address: on 8 bytes."""
        ...

    def copy_out(self, address: int, target: Any) -> Copy:
        """Starts copying the device's memory, as the steps launched so far leave it, to the host's (uint8 array)."""
        ...

    def write(self, address: int, source: Any) -> None:
        """As copy_in, with no checksum: it is over once a fence taken afterwards is passed."""
        ...

    def copying(self) -> AbstractContextManager[object]:
        """What a thread launches on the device within comes after every `write` before it, and counts as one for a fence."""
        ...

    def fence(self) -> Fence | None:
        """Behind every `write` so far; None if they are over."""
        ...

    def prepare(self, chunk: int) -> int:
        """Has the system provide a free chunk's memory as well as it can (huge pages); returns how many bytes of it are so now."""
        ...

    def discard(self, first_chunk: int, num_chunks: int) -> None:
        """Gives the memory of free chunks back to the system, where the device has a system to give it to."""
        ...

    def copy_within(self, piece_bytes: int, sources: IntArray, targets: IntArray) -> None:
        """Copies piece sources[i] of the arena to targets[i], of which none is both; piece p is [p * piece_bytes, (p + 1) *
        piece_bytes)."""
        ...

    def checksum(self, address: int, num_bytes: int) -> int:
        """Of the device's memory, as the steps launched so far leave it (memory/checksum.py). address: on 8 bytes."""
        ...

    def export(self) -> list[int]:
        """Descriptors of all chunks, in order, which the caller closes (memory/handles.py): a memory made of them, in this process
        or another, after the death of this one too, has the same chunks with what is in them."""
        ...

    def close(self) -> None:
        """Ends all mappings; no view may be touched afterwards."""
        ...
