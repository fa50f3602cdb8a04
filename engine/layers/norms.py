"""What post-norm decoders need beside `engine.ops`: plain additions, and norms over some columns of a matrix. T tokens."""

from __future__ import annotations

from torch import Tensor

from engine import ops
from engine.steps.program import call, empty


def add(update: Tensor, residual: Tensor) -> None:
    """residual [T, W] += update [T, W]."""
    call(residual.view(residual.shape).add_, update.view(update.shape))


def norm_columns(x: Tensor, first: int, weight: Tensor, eps: float, around_one: bool) -> None:
    """Normalises columns first to first + W of x [T, N] in place, as ops.rms_norm does with weight [W]."""
    columns = x[:, first : first + len(weight)]
    # the rows of a kernel's arrays lie end to end
    rows = empty(x, len(x), len(weight))
    call(rows.view(rows.shape).copy_, columns)
    normed = ops.rms_norm(rows, weight, eps, around_one)
    call(columns.copy_, normed.view(normed.shape))
