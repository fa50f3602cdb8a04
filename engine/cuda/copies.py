"""Copies data between a CUDA device and the host while steps run. The device's copy engines make the copies, on one stream for each
direction. Kernels then compute checksums of the copied bytes.

Host memory that is not registered with the driver (memory/host_registration.py) is copied through the driver's own buffers. That is
slower, and the call that starts a copy waits for part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from engine.cuda.kernels import triton_checksum
from engine.memory.chunk_memory import Piece
from loader.packing import checksum

WORD_BYTES = 8


class EventFence:
    """A point on a CUDA stream, after everything launched on it so far, that can be tested and waited for (a
    loader.reading.sinks.Fence)."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # blocking: a waiting thread sleeps, and holds no lock
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class SummedCopies:
    """Copies of N pieces of memory with their checksums (engine.memory.chunk_memory.DeviceCopies). `wait` returns the checksums.

    fence: passed once the copies have ended and `partial_sums` is filled.
    partial_sums [N, P, 2] int64 in page-locked memory: for each piece, and for each of P parts of its 8-byte words, the sum of the
    words and the sum of index * word.
    rests: an entry for each piece whose bytes are not a whole number of words: (index of the piece, its number of whole words, the
    bytes after these as uint8 in host memory). These bytes are read when the copies have ended."""

    def __init__(self, fence: EventFence, partial_sums: torch.Tensor, rests: Sequence[tuple[int, int, Any]]) -> None:
        self._fence, self._partial_sums, self._rests = fence, partial_sums, rests

    def done(self) -> bool:
        return self._fence.done()

    def wait(self) -> list[int]:
        self._fence.wait()
        sums = self._partial_sums.numpy().view(np.uint64).sum(axis=1, dtype=np.uint64)
        for number, num_words, rest in self._rests:
            checksum.add_rest(rest, num_words, sums[number])
        return [plain << 64 | weighted for plain, weighted in sums.tolist()]


class SummedCopy:
    """The copy of one piece of memory, with its checksum (engine.memory.chunk_memory.DeviceCopy)."""

    def __init__(self, copies: SummedCopies) -> None:
        self._copies = copies

    def done(self) -> bool:
        return self._copies.done()

    def wait(self) -> int:
        return self._copies.wait()[0]


class CudaStreams:
    """The CUDA streams of one device besides that of steps: one for copies to the device, one for copies from it, and one for
    checksums, so that no copy waits for a checksum."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.incoming, self.outgoing, self._sums = (torch.cuda.Stream(device) for _ in range(3))

    def synchronise(self) -> None:
        """Waits for all steps, copies and checksums launched so far. It does not wait for the device as a whole, because that is an
        error while another thread captures a graph."""
        for stream in (torch.cuda.default_stream(self._device), self.incoming, self.outgoing, self._sums):
            stream.synchronize()

    def finish_steps(self) -> None:
        """Waits for everything launched so far on the stream of steps."""
        torch.cuda.default_stream(self._device).synchronize()

    def steps_so_far(self) -> EventFence:
        """Returns a fence that is passed once everything launched so far on the stream of steps has ended."""
        return EventFence(torch.cuda.default_stream(self._device))

    def on_incoming(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.incoming)

    def after_steps(self) -> None:
        """Makes all later copies from the device (those on `outgoing`) wait until the steps launched so far have ended."""
        self.outgoing.wait_stream(torch.cuda.default_stream(self._device))

    def summed(self, pieces: Sequence[Piece], stream: torch.cuda.Stream) -> SummedCopies:
        """Launches the checksums of the copies that were started last on `stream`, and returns copies and checksums as one object.
        pieces: for each copy its address on the device, aligned to 8 bytes, and the host memory that is its source or target.
        Raises torch.OutOfMemoryError if there is no memory for the sums; the copies have then ended."""
        copied = EventFence(stream)
        self._sums.wait_event(copied.event)
        try:
            partial_sums = self._start_sums([(address, len(held) // WORD_BYTES) for address, held in pieces])
            rests = [
                (number, len(held) // WORD_BYTES, held[-rest:])
                for number, (_, held) in enumerate(pieces)
                if (rest := len(held) % WORD_BYTES)
            ]
            return SummedCopies(EventFence(self._sums), partial_sums, rests)
        except BaseException:
            EventFence(self._sums).wait()  # the checksums run after the copies
            raise

    def sum_of(self, held: torch.Tensor) -> int:
        """Returns the checksum of `held` (uint8 in device memory, aligned to 8 bytes) with the content after all steps launched so
        far, for which it waits."""
        self._sums.wait_stream(torch.cuda.default_stream(self._device))
        num_words = len(held) // WORD_BYTES
        partial_sums = self._start_sums([(held.data_ptr(), num_words)])
        with torch.cuda.stream(self._sums):
            rest = held[num_words * WORD_BYTES :].cpu().numpy()
        return SummedCopies(EventFence(self._sums), partial_sums, [(0, num_words, rest)]).wait()[0]

    def _start_sums(self, extents: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Launches the checksums of N extents of device memory, each (address, number of words), on the stream of checksums.
        Returns their partial sums [N, P, 2] (as in SummedCopies) in page-locked host memory, which are valid once that stream has
        executed everything launched on it so far."""
        table = np.array(extents, np.int64)
        shape = (len(table), triton_checksum.num_programs(int(table[:, 1].max())), 2)
        is_cuda = self._device.type == "cuda"
        with torch.cuda.stream(self._sums):  # all memory is allocated first, so that nothing is under way if there is too little
            sent = torch.empty(table.shape, dtype=torch.int64, pin_memory=is_cuda)
            on_host = torch.empty(shape, dtype=torch.int64, pin_memory=is_cuda)
            on_device = torch.empty(table.shape, dtype=torch.int64, device=self._device)
            partial = torch.empty(shape, dtype=torch.int64, device=self._device)
            sent.numpy()[:] = table
            on_device.copy_(sent, non_blocking=True)  # torch reuses the memory of `sent` only when this copy has ended
            triton_checksum.partial_sums(on_device, partial)
            on_host.copy_(partial, non_blocking=True)
        return on_host
