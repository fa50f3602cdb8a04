"""Edits rows of logits on the device: a mask in the logits' own type, then in float32 the bias, penalties and banned ids."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.cuda.edit_columns import EditedPart
from engine.cuda.kernels import entry


def edited_logits(logits: Tensor, first: int, num_rows: int, part: EditedPart, sent: Mapping[str, Tensor]) -> Tensor:
    """Returns num_rows rows of logits from `first` on as float32 [num_rows, V], with a part's masks and edits applied. sent: the
    part's columns on the device. A part without tokens, a bias or a ban takes fewer launches."""
    wide = torch.empty(num_rows, logits.shape[1], dtype=torch.float32, device=logits.device)
    # if no tokens are counted, the counts are not touched
    counts = torch.empty(wide.shape, dtype=torch.int32, device=logits.device) if part.has_tokens else wide.view(torch.int32)
    entry.widen(logits, first, sent["masks"], sent["words"], sent["counted"], wide, counts)
    if part.has_tokens or part.has_bias:
        entry.add_biases_and_count(wide, counts, sent["edits"], sent["words"])
    if part.has_tokens or part.has_ban:
        entry.penalise_and_ban(wide, counts, sent["edits"], sent["penalties"], sent["words"])
    return wide
