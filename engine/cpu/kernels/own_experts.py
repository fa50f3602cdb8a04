"""Mixtures of experts of which a rank has some (Numba): which pairs of a token and an expert are the rank's own, and what stands
for the others in sums over the ranks.

Shapes: T tokens, W width, E experts, C experts that each token passes through, P = T * C pairs, sorted by expert (experts.py).
Reference implementation: reference.experts.
"""

from __future__ import annotations

from typing import Any

from numba import int32, int64, njit, types, void

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "cache": True, "nogil": True}

KEEP_OWN_EXPERTS = void(int64, int64, int64[::1], int32[:, ::1], int32[::1], int64[::1])


@njit(**_OPTIONS)
def keep_own_experts(first: int, num_own: int, slots: Any, places: Any, firsts: Any, tokens: Any) -> None:
    """Brings the pairs of the experts [first, first + num_own) to the front. Arguments from `slots` on: as `route` has filled them.
    Afterwards firsts [:num_own + 1] are of these experts alone, and the places of all other pairs are the row behind theirs."""
    begin = firsts[first]
    num_rows = firsts[first + num_own] - begin
    for expert in range(num_own + 1):
        firsts[expert] = firsts[first + expert] - begin
    for row in range(num_rows):
        tokens[row] = tokens[begin + row]
    for row in range(num_rows, tokens.shape[0]):
        tokens[row] = 0
    for token in range(places.shape[0]):
        if slots[token] >= 0:
            for number in range(places.shape[1]):
                row = places[token, number] - begin
                places[token, number] = row if 0 <= row < num_rows else num_rows


def clear_behind_signature(element: types.Type) -> Any:
    return void(int32[::1], element[:, ::1])


@njit(**_OPTIONS)
def clear_behind(firsts: Any, made: Any) -> None:
    """Fills the row of made [P, W] behind those of a rank's experts with 0, if there is one: `combine` adds it for the pairs of
    others. firsts [E + 1]: of the rank's experts."""
    row = firsts[firsts.shape[0] - 1]
    if row < made.shape[0]:
        for column in range(made.shape[1]):
            made[row, column] = 0


def clear_signature(element: types.Type) -> Any:
    return void(element[:, ::1])


@njit(**_OPTIONS)
def clear(x: Any) -> None:
    """Fills x [T, W] with 0: scores of a rank that goes by another one's."""
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            x[row, column] = 0
