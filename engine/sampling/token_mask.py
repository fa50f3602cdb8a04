"""Applies token masks to logits: the logits of tokens that a mask rules out become the lowest finite number of their dtype.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.grammar.row_masks import RowMasks

ROWS_AT_ONCE = 16  # bounds the work space: each row needs a copy of its logits and one byte for each token


def apply_row_masks(logits: Tensor, masks: RowMasks, first: int) -> None:
    """Applies masks to the logits [N, V] of sampling rows `first` to `first` + N - 1, in place. NaN and infinities stay, so that
    bad rows are still found. masks: the masks of the whole step's rows."""
    inside = [at for at, row in enumerate(masks.rows.tolist()) if first <= row < first + len(logits)]
    for start in range(0, len(inside), ROWS_AT_ONCE):
        part = slice(inside[start], inside[min(start + ROWS_AT_ONCE, len(inside)) - 1] + 1)  # rows ascend, so they are one slice
        rows = torch.from_numpy(masks.rows[part] - first).to(logits.device)
        values = logits[rows]
        keep = torch.from_numpy(masks.allowed(part, logits.shape[1])).to(logits.device) | ~torch.isfinite(values)
        logits[rows] = torch.where(keep, values, torch.finfo(logits.dtype).min)
