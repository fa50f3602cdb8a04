"""Draws the random shapes and inputs of a kernel's case, and compares its result with the reference implementation's."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Draw:
    """A source of random shapes and tensors from one seed, of one dtype, on one device."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str) -> None:
        self.shapes, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device
        self.interpreted = device == "cpu"

    def one_of(self, *values: Any) -> Any:
        return self.shapes.choice(values)

    def between(self, low: int, high: int) -> int:
        return self.shapes.randint(low, high)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.dtype)

    def on(self, x: Tensor) -> Tensor:
        """Returns a copy of the tensor on the device."""
        return x.clone() if self.interpreted else x.to(self.device)

    def like(self, x: Tensor) -> Tensor:
        """Returns memory for a result like x, filled with NaN (integers: -7), so that unwritten places show."""
        out = torch.empty(x.shape, dtype=x.dtype, device=self.device)
        return out.fill_(math.nan) if x.is_floating_point() else out.fill_(-7)


def close(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == wanted.shape
    torch.testing.assert_close(actual.cpu().float(), wanted.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
