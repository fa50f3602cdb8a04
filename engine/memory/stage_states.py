"""Divides the memory in which a pipeline stage passes its states (activations) to the next stage: they lie one after the other,
without padding.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def state_rows(memory: Tensor, states: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
    """Divides `memory` (uint8) into the places of several states, one after the other. Returns one view of `memory` for each state,
    and copies nothing: for a state [T, W] (T rows of width W), the place for its first num_tokens rows, [num_tokens, W] in its
    dtype. states: tensors of which only W and the dtype are used."""
    rows, begin = [], 0
    for state in states:
        end = begin + num_tokens * state.shape[1] * state.element_size()
        rows.append(memory[begin:end].view(state.dtype).view(num_tokens, state.shape[1]))
        begin = end
    return rows
