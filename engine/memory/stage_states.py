"""Lays out the states (activations) that a pipeline stage passes on in memory, one after the other and without padding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def state_rows(memory: Tensor, states: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
    """Returns views of the places of several states in `memory` (uint8), in which they lie one after the other: for each state [T,
    W] (T rows of width W), its first num_tokens rows, as [num_tokens, W] of its dtype. states: tensors that give W and the
    dtype."""
    rows, begin = [], 0
    for state in states:
        end = begin + num_tokens * state.shape[1] * state.element_size()
        rows.append(memory[begin:end].view(state.dtype).view(num_tokens, state.shape[1]))
        begin = end
    return rows
