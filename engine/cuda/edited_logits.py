"""Edits rows of logits on the device before they are sampled: applies a mask in the logits' own type, then in float32 the bias,
penalties and banned ids.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.cuda.edit_columns import EditedPart
from engine.cuda.kernels import entry


def edited_logits(logits: Tensor, first: int, num_rows: int, part: EditedPart, sent: Mapping[str, Tensor]) -> Tensor:
    """Returns rows `first` to `first` + num_rows - 1 of logits as float32 [num_rows, V], with masks and edits applied. part: which
    kinds of edits these rows have; fewer kinds take fewer launches. sent: the columns on the device that describe the edits."""
    wide = torch.empty(num_rows, logits.shape[1], dtype=torch.float32, device=logits.device)
    # if no tokens are counted, the counts are not touched
    counts = torch.empty(wide.shape, dtype=torch.int32, device=logits.device) if part.has_tokens else wide.view(torch.int32)
    entry.widen(logits, first, sent["masks"], sent["words"], sent["counted"], wide, counts)
    if part.has_tokens or part.has_bias:
        entry.add_biases_and_count(wide, counts, sent["edits"], sent["words"])
    if part.has_tokens or part.has_ban:
        entry.penalise_and_ban(wide, counts, sent["edits"], sent["penalties"], sent["words"])
    return wide
