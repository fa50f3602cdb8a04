"""Mixtures of experts on the CPU (Numba): which experts each token passes through, and the weighted sum of what they return. The
products between are grouped_linear.py's.

Shapes: T tokens, W width, E experts, C experts that each token passes through, P = T * C pairs of a token and one of its experts,
sorted by expert. Reference implementations: reference.route, reference.experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, int32, int64, njit, prange, types, void

from engine.cpu.kernels.bits import FASTMATH, named, widen
from engine.cpu.kernels.lanes import load, store
from engine.cpu.kernels.vectors import LANES

_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}


def route_signature(element: types.Type) -> Any:
    return void(element[:, ::1], int64[::1], int64, boolean, float32[:, ::1], int32[:, ::1], int32[::1], int64[::1])


@njit(**_HELPER)
def _choose(scores: Any, token: int, num_experts: int, chosen: Any, best: Any) -> None:
    """Writes the experts with the highest scores of a token to its row of chosen [T, C], and these scores to best [C], the highest
    first. A NaN is higher than nothing, so there are always C different experts."""
    num_chosen, found = best.shape[0], 0
    for expert in range(num_experts):
        score = widen(scores[token, expert])
        if found < num_chosen:
            at, found = found, found + 1
        elif score > best[num_chosen - 1]:
            at = num_chosen - 1
        else:
            continue
        while at > 0 and score > best[at - 1]:
            best[at], chosen[token, at] = best[at - 1], chosen[token, at - 1]
            at -= 1
        best[at], chosen[token, at] = score, int32(expert)


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


def _route(
    scores: Any,  # [T, E], or with further columns
    slots: Any,  # [T] int64: below 0 for padding, which passes through no expert
    num_experts: int,
    normalised: bool,
    weights: Any,  # [T, C] float32: of each token's experts; undefined for padding
    places: Any,  # [T, C] int32: the rows of each token's pairs; undefined for padding
    firsts: Any,  # [E + 1] int32: each expert's first row; behind the last, the number of rows
    tokens: Any,  # [P] int64: the token of each row; 0 behind the last
) -> None:
    num_tokens, num_chosen = places.shape
    best, following = np.empty(num_chosen, np.float32), np.zeros(num_experts, np.int32)
    for token in range(num_tokens):
        if slots[token] >= 0:
            _choose(scores, token, num_experts, places, best)
            _weigh(scores, token, num_experts, normalised, best, weights)
            for number in range(num_chosen):
                following[places[token, number]] += 1
    num_rows = int32(0)
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
    scores: Any,  # [T, E], or [T, E + 1], where the last is the logit of the factor of `shared`
    shared: Any,  # [T, W], or [0, W] for none
    out: Any,  # [T, W]
) -> None:
    width = out.shape[1]
    whole = width - width % LANES
    for token in prange(out.shape[0]):
        if slots[token] < 0:
            out[token] = 0
            continue
        gate = float32(1.0) / (float32(1.0) + np.exp(-widen(scores[token, scores.shape[1] - 1])))
        for i in range(0, whole, LANES):
            _combine_lanes(made, weights, places, token, gate, shared, i, LANES, out)
        if whole < width:
            _combine_lanes(made, weights, places, token, gate, shared, whole, width - whole, out)


route = njit(**_OPTIONS)(_route)
combine_serial = njit(**_OPTIONS)(_combine)
combine_parallel = njit(**_OPTIONS, parallel=True)(named("_combine_parallel", _combine))
