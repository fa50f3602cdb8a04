"""Restricts a mixture of experts to the pairs of a token and an expert that one rank computes, where the experts are divided among
ranks, the devices of a split model (Numba). In sums over the ranks, the rank adds 0 for all other pairs.

Shapes: T tokens, W width, E experts, C experts that each token passes through, P = T * C pairs, sorted by expert (experts.py).
Reference implementation: reference.experts."""

from __future__ import annotations

from typing import Any

from numba import int32, int64, njit, types, void

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "cache": True, "nogil": True}

KEEP_OWN_EXPERTS = void(int64, int64, int64[::1], int32[:, ::1], int32[::1], int64[::1])


@njit(**_OPTIONS)
def keep_own_experts(first: int, num_own: int, slots: Any, places: Any, firsts: Any, tokens: Any) -> None:
    """Restricts a routing, in place, to the experts that one rank (device of a split model) holds: the numbers from `first` to
    below first + num_own.

    The routing, in the form of experts._route: slots [T]: each token's KV slot, below 0 for padding. places [T, C]: the rows of
    each token's pairs. firsts [E + 1]: each expert's first row. tokens [P]: the token of each row.

    Afterwards the pairs of own experts have the rows from 0 on. firsts [:num_own + 1] holds the first row of each own expert, and
    the end of the last one's rows. tokens holds the tokens of these rows, then zeros. The place of every other pair is the row
    after the last own row."""
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
    """Restricts a routing, in place, to the pairs of a token and an expert that this rank (device of a split model) computes, where
    ranks have copies of each other's experts. The ranks that hold an expert divide its tokens: each computes those whose slot,
    modulo the number of holders, is its index among the holders. slots, places, firsts and tokens: the routing, as in
    keep_own_experts.

    turns [E, 3]: for each expert the number of its holders, this rank's index among them (-1: this rank does not hold the expert),
    and the expert's index among the rank's own experts, which ascends. new_rows [P]: scratch. counts: the number of rows of each
    own expert is added to it, at the expert's index; [0]: nothing is counted."""
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
    """Fills the row of made [P, W] after the last row of a rank's own experts with 0, if made has such a row. keep_own_experts and
    keep_own_turns give all other pairs the place of this row, so that `combine` adds 0 for them. firsts: the first row of each own
    expert, and the end of the last one's rows."""
    row = firsts[firsts.shape[0] - 1]
    if row < made.shape[0]:
        for column in range(made.shape[1]):
            made[row, column] = 0


def clear_signature(element: types.Type) -> Any:
    return void(element[:, ::1])


@njit(**_OPTIONS)
def clear(x: Any) -> None:
    """Fills x [T, W] with 0. All ranks but the first do this with their scores of experts, before the scores are summed over the
    ranks, so that all ranks get the first rank's scores."""
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            x[row, column] = 0
