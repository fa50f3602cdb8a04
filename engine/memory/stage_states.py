"""Lays out in memory the states that a pipeline stage passes on, one after the other and without padding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def state_rows(memory: Tensor, states: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
    """Returns, for each of the states [T, W] (T rows of width W), the part of `memory` (uint8) for its first num_tokens rows, as
    [num_tokens, W] of its dtype."""
    rows, begin = [], 0
    for state in states:
        end = begin + num_tokens * state.shape[1] * state.element_size()
        rows.append(memory[begin:end].view(state.dtype).view(num_tokens, state.shape[1]))
        begin = end
    return rows
