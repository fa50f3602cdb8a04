"""Copies between a CUDA device and the host, concurrent with steps: the device's copy engines make them, on one stream per
direction, while checksums of what was copied are computed on the device.

Host memory that is not registered with the driver (memory/host_registration.py) goes through the driver's own buffers: that is
slower, and the call waits for part of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from engine.cuda.kernels import triton_checksum
from loader import checksum

WORD_BYTES = 8


class EventFence:
    """The loader.sinks.Fence of a CUDA stream: a point after everything launched on the stream so far."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)  # blocking: a waiting thread sleeps, and holds no lock
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class SummedCopy:
    """A copy with its checksum (engine.memory.chunk_memory.DeviceCopy). fences: one after the copy, one after `partial_sums` is
    filled. partial_sums: [P, 2] int64 in page-locked memory, sums of the num_words whole words. rest: the bytes after these
    words, uint8, in host memory, read when the copy has ended."""

    def __init__(self, fences: tuple[EventFence, ...], partial_sums: torch.Tensor, rest: Any, num_words: int) -> None:
        self._fences, self._partial_sums, self._rest, self._num_words = fences, partial_sums, rest, num_words

    def done(self) -> bool:
        return all(fence.done() for fence in self._fences)

    def wait(self) -> int:
        for fence in self._fences:
            fence.wait()
        sums = self._partial_sums.numpy().view(np.uint64).sum(axis=0, dtype=np.uint64)
        checksum.add_rest(self._rest, self._num_words, sums)
        return checksum.joined(sums)


class CudaStreams:
    """The streams of one device: one for copies to it, one for copies from it, and one for checksums, so that no copy waits for a
    checksum."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.incoming, self.outgoing, self._sums = (torch.cuda.Stream(device) for _ in range(3))

    def synchronise(self) -> None:
        """Waits for steps and copies. It does not wait for the device as a whole, which is an error while another thread captures a
        graph."""
        for stream in (torch.cuda.default_stream(self._device), self.incoming, self.outgoing, self._sums):
            stream.synchronize()

    def finish_steps(self) -> None:
        """Waits for everything launched so far on the stream of steps."""
        torch.cuda.default_stream(self._device).synchronize()

    def on_incoming(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.incoming)

    def after_steps(self) -> None:
        """Makes copies that are started on `outgoing` from now on see what the steps launched so far leave."""
        self.outgoing.wait_stream(torch.cuda.default_stream(self._device))

    def summed(self, copied: torch.Tensor, stream: torch.cuda.Stream, host: Any) -> SummedCopy:
        """Returns the copy started last on `stream`, with its checksum. copied: the range on the device, uint8, aligned to 8 bytes.
        host: the range in host memory it is copied from or to. Raises torch.OutOfMemoryError, after the copy has ended."""
        copy_fence = EventFence(stream)
        self._sums.wait_stream(stream)
        try:
            partial_sums = self._start_sum(copied)
        except BaseException:
            copy_fence.wait()
            raise
        num_words = len(copied) // WORD_BYTES
        return SummedCopy((copy_fence, EventFence(self._sums)), partial_sums, host[num_words * WORD_BYTES :], num_words)

    def sum_of(self, held: torch.Tensor) -> int:
        """Returns the checksum of `held`: device memory, uint8, aligned to 8 bytes, as the steps launched so far leave it."""
        self._sums.wait_stream(torch.cuda.default_stream(self._device))
        partial_sums = self._start_sum(held)
        num_words = len(held) // WORD_BYTES
        with torch.cuda.stream(self._sums):
            rest = held[num_words * WORD_BYTES :].cpu().numpy()
        return SummedCopy((EventFence(self._sums),), partial_sums, rest, num_words).wait()

    def _start_sum(self, held: torch.Tensor) -> torch.Tensor:
        """Launches the checksum of `held`, device memory, on the stream `_sums`. Returns the partial sums [P, 2] in page-locked
        host memory. They are filled once that stream has executed everything launched on it so far."""
        whole = len(held) // WORD_BYTES * WORD_BYTES
        with torch.cuda.stream(self._sums):
            partial = triton_checksum.new_partial_sums(self._device)
            if whole:
                triton_checksum.partial_sums(held[:whole].view(torch.int64), partial)
            on_host = torch.empty(partial.shape, dtype=partial.dtype, pin_memory=self._device.type == "cuda")
            on_host.copy_(partial, non_blocking=True)
        return on_host
