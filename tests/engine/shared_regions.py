"""Stands in for memory that GPUs map from each other: memfds, which processes map from each other."""

from __future__ import annotations

import os

import torch

from engine.cuda.kernels.triton_peers import REGION_BYTES
from engine.memory import mappings


class SharedRegions:
    """An engine.cuda.peers.Regions of the CPU, for interpreted kernels."""

    num_bytes = REGION_BYTES

    def __init__(self, size: int) -> None:
        assert REGION_BYTES % os.sysconf("SC_PAGE_SIZE") == 0
        self._fd = os.memfd_create("region")
        os.ftruncate(self._fd, REGION_BYTES)
        self._address = mappings.reserve(size * REGION_BYTES)
        self.all = torch.frombuffer(mappings.bytes_at(self._address, size * REGION_BYTES), dtype=torch.uint8).view(size, -1)
        self.map(0, self._fd)

    def export(self) -> int:
        return os.dup(self._fd)

    def map(self, step: int, handle: int) -> None:
        mappings.map_file(self._address + step * REGION_BYTES, REGION_BYTES, handle, 0)

    def wait_for_steps(self) -> None:
        """Does nothing: an interpreted kernel has ended when its launch returns."""

    def close(self) -> None:
        """Closes the descriptor. The regions stay mapped, because a kernel may be interpreted in another thread until it sees that
        it shall not wait any more."""
        os.close(self._fd)
