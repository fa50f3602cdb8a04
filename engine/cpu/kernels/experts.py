"""Computes mixtures of experts on the CPU (Numba): which experts each token passes through, and the weighted sum of what the
experts return. The products with the experts' matrices, which come between, are in grouped_linear.py.

Shapes: T tokens, W width, E experts, C experts that each token passes through, P = T * C pairs of a token and one of its experts,
sorted by expert. Reference implementations: reference.route, reference.route_by_sigmoid, reference.experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, float64, int32, int64, njit, prange, types, void

from engine.cpu.kernels.bits import FASTMATH, named, widen
from engine.cpu.kernels.lanes import load, store
from engine.cpu.kernels.vectors import LANES

_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}


def route_signature(element: types.Type) -> Any:
    routing = (float32[:, ::1], int32[:, ::1], int32[::1], int64[::1], int64[::1])
    return void(element[:, ::1], int64[::1], int64, boolean, boolean, *routing)


ROUTE_BY_SIGMOID = void(
    *(float32[:, ::1], int64[::1], float32[::1], int64, int64, boolean, float64, boolean),
    *(float32[:, ::1], int32[:, ::1], int32[::1], int64[::1], int64[::1]),
)


@njit(**_HELPER)
def _insert(score: Any, number: int, found: int, chosen: Any, best: Any) -> int:
    """Inserts `number`, with its score, into chosen [C] if its score is among the C highest so far. Returns how many numbers are
    chosen afterwards.

    best [C]: the scores of the chosen numbers. Both arrays are sorted, the highest score first; of equal scores the one that was
    inserted earlier comes first. found: how many numbers were chosen before this call. While fewer than C are chosen, every number
    is inserted, even if its score is NaN."""
    num_chosen = best.shape[0]
    if found < num_chosen:
        at, found = found, found + 1
    elif score > best[num_chosen - 1]:
        at = num_chosen - 1
    else:
        return found
    while at > 0 and score > best[at - 1]:
        best[at], chosen[at] = best[at - 1], chosen[at - 1]
        at -= 1
    best[at], chosen[at] = score, int32(number)
    return found


@njit(**_HELPER)
def _choose(scores: Any, token: int, num_experts: int, chosen: Any, best: Any) -> None:
    """Writes the C experts with the highest scores of one token to its row of chosen [T, C], and these scores to best [C], the
    highest first. scores: row `token`, columns below num_experts, are the token's scores."""
    found = 0
    for expert in range(num_experts):
        found = _insert(widen(scores[token, expert]), expert, found, chosen[token], best)


@njit(**_HELPER)
def _weigh(scores: Any, token: int, num_experts: int, normalised: bool, best: Any, weights: Any) -> None:
    total, num_chosen = float32(0.0), best.shape[0]
    for number in range(num_chosen):
        weights[token, number] = np.exp(best[number] - best[0])
        total += weights[token, number]
    if not normalised:
        total = float32(0.0)
        for expert in range(num_experts):
            total += np.exp(widen(scores[token, expert]) - best[0])
    for number in range(num_chosen):
        weights[token, number] /= total


@njit(**_HELPER)
def _count(chosen: Any, following: Any) -> None:
    for number in range(chosen.shape[0]):
        following[chosen[number]] += 1


@njit(**_HELPER)
def _sort_pairs(slots: Any, places: Any, following: Any, firsts: Any, tokens: Any, counts: Any) -> None:
    """Sorts the pairs of a token and an expert by expert, so that each pair gets a row. Fills firsts [E + 1] and tokens [P] as
    comments in _route describe, and replaces each expert in places [T, C] by the row of the pair. following [E]: number of rows of
    each expert; overwritten. counts [E]: these numbers are added to it; [0]: they are not."""
    num_tokens, num_chosen = places.shape
    num_rows, num_experts = int32(0), following.shape[0]
    for expert in range(counts.shape[0]):
        counts[expert] += following[expert]
    for expert in range(num_experts):
        firsts[expert] = num_rows
        num_rows += following[expert]
        following[expert] = firsts[expert]
    firsts[num_experts] = num_rows
    for token in range(num_tokens):
        if slots[token] >= 0:
            for number in range(num_chosen):
                expert = places[token, number]
                row = following[expert]
                following[expert] += 1
                places[token, number], tokens[row] = row, token
    for row in range(num_rows, tokens.shape[0]):
        tokens[row] = 0


def _route(
    scores: Any,  # [T, E], or with further columns
    slots: Any,  # [T] int64: below 0 for padding, which passes through no expert
    num_experts: int,
    normalised: bool,
    by_sigmoid: bool,  # weights are the sigmoids of the scores
    weights: Any,  # [T, C] float32: of each token's experts; undefined for padding
    places: Any,  # [T, C] int32: the rows of each token's pairs; undefined for padding
    firsts: Any,  # [E + 1] int32: each expert's first row; behind the last, the number of rows
    tokens: Any,  # [P] int64: the token of each row; 0 behind the last
    counts: Any,  # [E] int64: each expert's number of rows is added; [0]: it is not counted
) -> None:
    num_tokens, num_chosen = places.shape
    best, following = np.empty(num_chosen, np.float32), np.zeros(num_experts, np.int32)
    for token in range(num_tokens):
        if slots[token] >= 0:
            _choose(scores, token, num_experts, places, best)
            if by_sigmoid:
                for number in range(num_chosen):
                    weights[token, number] = float32(1.0) / (float32(1.0) + np.exp(-best[number]))
            else:
                _weigh(scores, token, num_experts, normalised, best, weights)
            _count(places[token], following)
    _sort_pairs(slots, places, following, firsts, tokens, counts)


@njit(**_HELPER)
def _choose_groups(merits: Any, by_best: bool, chosen: Any, best: Any) -> None:
    """Writes to chosen [C] the C best groups, the best first, and their merits to best [C]. The merit of a group is the sum of its
    two highest numbers in merits [groups, experts of a group], or with by_best its highest number."""
    found = 0
    for group in range(merits.shape[0]):
        first, second = merits[group, 0], merits[group, 1]
        if second > first:
            first, second = second, first
        for at in range(2, merits.shape[1]):
            merit = merits[group, at]
            if merit > first:
                first, second = merit, first
            elif merit > second:
                second = merit
        found = _insert(first if by_best else first + second, group, found, chosen, best)


@njit(**_HELPER)
def _score(logits: Any, by_softmax: bool, scores: Any) -> None:
    """Writes to scores [E] float32 the sigmoids of logits [E]; with by_softmax their softmax instead."""
    if not by_softmax:
        for expert in range(scores.shape[0]):
            scores[expert] = float32(1.0) / (float32(1.0) + np.exp(-logits[expert]))
        return
    top, total = logits[0], float32(0.0)
    for expert in range(scores.shape[0]):
        top = max(top, logits[expert])
    for expert in range(scores.shape[0]):
        scores[expert] = np.exp(logits[expert] - top)
        total += scores[expert]
    for expert in range(scores.shape[0]):
        scores[expert] /= total


def _route_by_sigmoid(
    logits: Any,  # [T, E] float32
    slots: Any,  # as for _route, as are those from `weights` on
    correction: Any,  # [E] float32
    num_groups: int,
    num_chosen_groups: int,
    normalised: bool,
    factor: float,
    by_softmax: bool,
    weights: Any,
    places: Any,
    firsts: Any,
    tokens: Any,
    counts: Any,
) -> None:
    num_tokens, num_chosen = places.shape
    num_experts = correction.shape[0]
    scores, merits = np.empty(num_experts, np.float32), np.empty((num_groups, num_experts // num_groups), np.float32)
    size = merits.shape[1]
    best, following = np.empty(num_chosen, np.float32), np.zeros(num_experts, np.int32)
    groups, best_groups = np.empty(num_chosen_groups, np.int32), np.empty(num_chosen_groups, np.float32)
    allowed = np.ones(num_groups, np.bool_)
    for token in range(num_tokens):
        if slots[token] < 0:
            continue
        _score(logits[token], by_softmax, scores)
        for expert in range(num_experts):
            merits[expert // size, expert % size] = scores[expert] + correction[expert]
        if num_chosen_groups < num_groups:
            _choose_groups(merits, by_softmax, groups, best_groups)
            allowed[:] = False
            for group in groups:
                allowed[group] = True
        found = 0
        for expert in range(num_experts):  # in this order: of equal experts the lower one comes first
            group = expert // size
            if allowed[group]:
                found = _insert(merits[group, expert % size], expert, found, places[token], best)
        total = float32(0.0)
        for number in range(num_chosen):
            weights[token, number] = scores[places[token, number]]
            total += weights[token, number]
        share = float32(factor) / (total + float32(1e-20)) if normalised else float32(factor)
        for number in range(num_chosen):
            weights[token, number] *= share
        _count(places[token], following)
    _sort_pairs(slots, places, following, firsts, tokens, counts)


def combine_signature(element: types.Type) -> Any:
    rows = element[:, ::1]
    return void(rows, float32[:, ::1], int32[:, ::1], int64[::1], rows, rows, rows)


@njit(inline="always", fastmath=FASTMATH)
def _combine_lanes(made: Any, weights: Any, places: Any, token: int, gate: Any, shared: Any, i: int, count: int, out: Any) -> None:
    width = out.shape[1]
    total = load(made, places[token, 0] * width + i, count) * weights[token, 0]
    for number in range(1, places.shape[1]):
        total += load(made, places[token, number] * width + i, count) * weights[token, number]
    if shared.shape[0] > 0:
        total += load(shared, token * width + i, count) * gate
    store(out, token * width + i, count, total)


def _combine(
    made: Any,  # [P, W]: what the experts made of each pair's token
    weights: Any,  # [T, C] float32
    places: Any,  # [T, C] int32: the rows of each token's pairs
    slots: Any,  # [T] int64: below 0 for padding, whose result is 0
    gates: Any,  # [T, N], whose last column is the logit of the factor of `shared`; [0, N]: it is 1
    shared: Any,  # [T, W], or [0, W] for none
    out: Any,  # [T, W]
) -> None:
    width = out.shape[1]
    whole = width - width % LANES
    for token in prange(out.shape[0]):
        if slots[token] < 0:
            out[token] = 0
            continue
        gate = float32(1.0)
        if gates.shape[0] > 0:
            gate /= float32(1.0) + np.exp(-widen(gates[token, gates.shape[1] - 1]))
        for i in range(0, whole, LANES):
            _combine_lanes(made, weights, places, token, gate, shared, i, LANES, out)
        if whole < width:
            _combine_lanes(made, weights, places, token, gate, shared, whole, width - whole, out)


route = njit(**_OPTIONS)(_route)
route_by_sigmoid = njit(**_OPTIONS)(_route_by_sigmoid)
combine_serial = njit(**_OPTIONS)(_combine)
combine_parallel = njit(**_OPTIONS, parallel=True)(named("_combine_parallel", _combine))
