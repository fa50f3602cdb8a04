"""One contiguous range of memory per model for its weights. Releasing it unmaps it: touching a released tensor is a segmentation
fault, so a use after eviction can't pass unnoticed."""

from __future__ import annotations

import torch

from engine.memory.arena import anonymous_map


class WeightRange:
    """num_bytes of zeroed memory. Raises MemoryError."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = anonymous_map(num_bytes)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes)

    @property
    def buffer(self) -> memoryview:
        """For reads into it. Seen through torch, so that a view left in some traceback can't keep `release` from unmapping."""
        return self._memory.numpy().data

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = dtype.itemsize
        for extent in shape:
            num_bytes *= extent
        return self._memory[offset_bytes : offset_bytes + num_bytes].view(dtype).view(shape)

    def release(self) -> None:
        """Gives the memory back to the system. Idempotent."""
        self._map.close()
