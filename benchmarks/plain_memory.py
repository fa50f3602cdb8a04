"""Memory for a model with no engine around it: one piece of a device, as large as needed."""

from __future__ import annotations

import torch


class PlainRange:
    """num_bytes on a device in the place of engine.memory's range; `unmap` only forgets it."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.num_bytes = num_bytes
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = dtype.itemsize
        for extent in shape:
            num_bytes *= extent
        return self.memory[offset_bytes : offset_bytes + num_bytes].view(dtype).view(shape)

    def unmap(self) -> None:
        """Does nothing, because nothing is mapped."""
