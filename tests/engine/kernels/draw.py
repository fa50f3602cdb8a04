"""Draws the random shapes and inputs of a kernel's case, and compares its result with the reference implementation's."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LEAST = 1e-6  # of a difference that counts: float16 has no finer numbers than 6e-8, and sums have tens of terms


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


def close_in_sums(actual: Tensor, wanted: Tensor, sizes: Tensor, dtype: torch.dtype) -> None:
    """Compares sums whose terms were rounded to `dtype`, and that were rounded themselves. sizes: the sum of the absolute values of
    each one's terms. A term is off by a share of itself, whatever the others add up to, so what is allowed is a share of that
    sum: where terms cancel each other a share of the result says nothing. TOLERANCE is 5 roundings in bfloat16, 4 in float16; a
    gate, an up, the activation and their product are four, each of which is a full one for a few terms only."""
    assert actual.shape == wanted.shape == sizes.shape
    found, allowed = (actual.cpu().float() - wanted).abs(), TOLERANCE[dtype] * sizes + LEAST
    worst = int((found - allowed).nan_to_num(math.inf).argmax())
    told = f"{found.flatten()[worst]:.3g} off {wanted.flatten()[worst]:.3g}, {allowed.flatten()[worst]:.3g} allowed"
    assert bool((found <= allowed).all()), told
