"""Rounds the rows of a weight matrix to int8. Each row has a scale, by which its largest magnitude becomes 127; a weight is about
its rounded value times the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements rounded at a time: few enough that torch does not wake its thread pool, which belongs to the model whose step runs.
ELEMENTS = 32768
LARGEST = 127


def quantize_rows(rows: Tensor, values: Tensor, scales: Tensor) -> None:
    """Rounds the rows of a matrix to int8, with one scale for each row; value times scale is about the weight. rows: [N, K]
    (float32, bfloat16 or float16). values: int8 [N, K], scales: float32 [N]; both are written. Raises ValueError for rows that are
    not finite."""
    num_rows, width = rows.shape
    at_once = max(1, ELEMENTS // width)
    wide = torch.empty(min(at_once, num_rows), width)
    for first in range(0, num_rows, at_once):
        some = slice(first, min(first + at_once, num_rows))
        part = wide[: some.stop - first].copy_(rows[some])
        scale = part.abs().amax(1).div_(LARGEST)
        if not bool(torch.isfinite(scale).all()):
            raise ValueError("holds NaN or an infinity: cannot be quantised")
        scales[some] = scale
        scale[scale == 0] = 1.0  # rows of only zeros
        values[some] = part.div_(scale.unsqueeze(1)).round_()
