"""Memory as the engine keeps weights and KV: in huge pages, for what is measured without an engine."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from engine.memory.mappings import HUGE_PAGE_BYTES


def placed(*shape: int, dtype: torch.dtype) -> Tensor:
    """Undefined private memory that begins on a huge page's boundary."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    held = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -held.data_ptr() % HUGE_PAGE_BYTES
    return held[begin : begin + num_bytes].view(dtype).view(shape)
