"""Mixtures of experts whose experts are divided among ranks, the devices of a group (Numba): which pairs of a token and an expert
are a rank's own, and what it uses in place of the others' in sums over the ranks.

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
    """Reduces a routing of all experts to a rank's own experts [first, first + num_own), in place. slots [T], places [T, C], firsts
    [E + 1] and tokens [P]: as experts._route takes and fills them.

    Afterwards firsts [:num_own + 1] are the first rows of these experts, whose pairs begin at row 0, tokens are those of these rows
    (0 behind them), and the places of all other pairs are the row behind the last of these."""
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


KEEP_OWN_TURNS = void(int32[:, ::1], int64[::1], int32[:, ::1], int32[::1], int64[::1], int32[::1], int64[::1])


@njit(**_OPTIONS)
def keep_own_turns(turns: Any, slots: Any, places: Any, firsts: Any, tokens: Any, new_rows: Any, counts: Any) -> None:
    """Reduces a routing of all experts, as keep_own_experts does, to the pairs that a rank computes where ranks have copies of each
    other's experts. turns [E, 3]: for each expert the number of its holders, the rank's number among them (-1: it is none), and the
    expert's index among the rank's own, which ascends. A holder computes the tokens whose slot, modulo the number of holders, is
    its number. new_rows [P]: scratch. counts: the number of rows of each own expert is added, by its index; [0]: it is not."""
    num_rows, num_own = int32(0), 0
    begin = firsts[0]
    for expert in range(turns.shape[0]):
        end = firsts[expert + 1]
        holders, number = turns[expert, 0], turns[expert, 1]
        first = num_rows
        for row in range(begin, end):
            token = tokens[row]
            new_rows[row] = -1
            if number >= 0 and slots[token] % holders == number:
                new_rows[row] = num_rows
                tokens[num_rows] = token
                num_rows += int32(1)
        if number >= 0:
            firsts[num_own] = first
            if counts.shape[0] > 0:
                counts[num_own] += num_rows - first
            num_own += 1
        begin = end
    firsts[num_own] = num_rows
    for row in range(num_rows, tokens.shape[0]):
        tokens[row] = 0
    for token in range(places.shape[0]):
        if slots[token] >= 0:
            for number in range(places.shape[1]):
                row = new_rows[places[token, number]]
                places[token, number] = row if row >= 0 else num_rows


def clear_behind_signature(element: types.Type) -> Any:
    return void(int32[::1], element[:, ::1])


@njit(**_OPTIONS)
def clear_behind(firsts: Any, made: Any) -> None:
    """Fills the row of made [P, W] behind the last one of a rank's own experts with 0, if there is one. keep_own_experts or
    keep_own_turns has set the places of all other pairs to this row, so `combine` adds 0 for them. firsts: of the rank's experts;
    its last entry is the number of their rows."""
    row = firsts[firsts.shape[0] - 1]
    if row < made.shape[0]:
        for column in range(made.shape[1]):
            made[row, column] = 0


def clear_signature(element: types.Type) -> Any:
    return void(element[:, ::1])


@njit(**_OPTIONS)
def clear(x: Any) -> None:
    """Fills x [T, W] with 0. Ranks other than the first do so with their scores of experts before the sum over the ranks, so that
    all get the first rank's."""
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            x[row, column] = 0
