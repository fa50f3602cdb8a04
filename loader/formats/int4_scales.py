"""Checks and converts the scales of INT4 weights as they are read. Scales are held in 16 bits, which must represent the
checkpoint's numbers exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor


def narrow_scales(stored: Tensor, held: Tensor) -> None:
    """Writes stored scales (float32, bfloat16 or float16) to `held` (bfloat16 or float16, same shape). Raises ValueError for scales
    that are NaN or infinite, or that the dtype of `held` cannot represent exactly."""
    if not bool(torch.isfinite(stored).all()):
        raise ValueError("holds NaN or an infinity: no scale")
    held.copy_(stored)
    if not bool((held.float() == stored.float()).all()):
        raise ValueError(f"holds a scale that is no {str(held.dtype).removeprefix('torch.')}, in which scales are held")
