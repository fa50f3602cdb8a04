"""Computes products of rows that are sorted by expert with the matrices of their experts (Numba), for experts with few rows.

The weights of experts without rows are not read. Work is cut into shares of equal cost, one for each thread. A share consists of
whole stripes of outputs; a stripe's cost is that of reading its weights and of multiplying them with the expert's rows.

Shapes: P rows, E experts, K inputs, N outputs (4 at least). Reference implementation: reference.experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, int64, njit, prange, types, uint8, void

from engine.cpu.kernels.bits import FASTMATH, named
from engine.cpu.kernels.fp8_linear import FP8_STRIPE, fp8_stripe
from engine.cpu.kernels.linear import STRIPE, linear_stripe
from engine.cpu.kernels.widened_linear import (
    STRIPE_FLOATS,
    WIDENED_STRIPE,
    padded_inputs,
    padded_inputs_of,
    widen_rows,
    widened_stripe,
    widened_tiles,
)

_ROWS_AS_READING = 8  # the number of rows whose products cost as much as reading the weights
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}


@njit(**_HELPER)
def _rows_of(firsts: Any, expert: int, most_rows: int) -> int:
    """Returns how many rows an expert has; 0 if it has more than most_rows. firsts [E + 1]: the first row of each expert, and the
    end of the last one's rows."""
    num_rows = firsts[expert + 1] - firsts[expert]
    return num_rows if num_rows <= most_rows else 0


@njit(**_HELPER)
def stripes_of_share(firsts: Any, most_rows: int, stripes: int, share: int, num_shares: int) -> Any:
    """Returns the stripes of outputs that one share (`share` of num_shares) computes, as [E, 2] int64: for each expert, the first
    stripe and the end. The two are equal if the share computes nothing of the expert, in particular if the expert has no rows or
    more than most_rows. firsts [E + 1]: the first row of each expert, and the end of the last one's rows. stripes: number of
    stripes of each expert."""
    num_experts = firsts.shape[0] - 1
    found = np.zeros((num_experts, 2), np.int64)
    total = 0  # the cost of all products
    for expert in range(num_experts):
        num_rows = _rows_of(firsts, expert, most_rows)
        if num_rows:
            total += stripes * (_ROWS_AS_READING + num_rows)
    begin, end = total * share // num_shares, total * (share + 1) // num_shares
    at = 0  # the cost of the products of the experts before
    for expert in range(num_experts):
        num_rows = _rows_of(firsts, expert, most_rows)
        if num_rows:
            cost = _ROWS_AS_READING + num_rows
            found[expert, 0] = _stripes_up_to(begin - at, cost, stripes)
            found[expert, 1] = _stripes_up_to(end - at, cost, stripes)
            at += stripes * cost
    return found


@njit(**_HELPER)
def _stripes_up_to(cost: int, of_stripe: int, stripes: int) -> int:
    """Returns how many of an expert's stripes begin before `cost`. Stripe i begins at cost i * of_stripe."""
    return min(max(0, (cost + of_stripe - 1) // of_stripe), stripes)


def grouped_linear_signature(element: types.Type) -> Any:
    return void(element[:, ::1], element[:, :, ::1], element[:, ::1], int32[::1], int64, int64, element[:, ::1])


@njit(**_HELPER)
def _share(x: Any, weight: Any, bias: Any, firsts: Any, most_rows: int, share: int, num_shares: int, out: Any) -> None:
    """Multiplies rows x [P, K], sorted by expert, with the matrices weight [E, N, K] of their experts and adds the biases, for one
    share (`share` of num_shares) of the work, into out [P, N]. Experts with more than most_rows rows are left out. bias: [E, N], or
    [E, 0] for none. firsts [E + 1]: the first row of each expert."""
    num_experts, num_outputs = weight.shape[:2]
    mine = stripes_of_share(firsts, most_rows, (num_outputs + STRIPE - 1) // STRIPE, share, num_shares)
    none = np.empty(0, np.float32)
    for expert in range(num_experts):
        if mine[expert, 0] == mine[expert, 1]:
            continue
        own, to = x[firsts[expert] : firsts[expert + 1]], out[firsts[expert] : firsts[expert + 1]]
        for stripe in range(mine[expert, 0], mine[expert, 1]):
            end_output = min((stripe + 1) * STRIPE, num_outputs)
            linear_stripe(own, weight[expert], none, bias[expert], to, stripe * STRIPE, end_output)


def _grouped_linear(
    x: Any,  # [P, K]
    weight: Any,  # [E, N, K]
    bias: Any,  # [E, N], or [E, 0] for none
    firsts: Any,  # [E + 1] int32: the first row of each expert
    most_rows: int,  # experts with more rows are left out
    num_shares: int,  # number of shares that the work is cut into, one for each thread
    out: Any,  # [P, N]
) -> None:
    for share in prange(num_shares):
        _share(x, weight, bias, firsts, most_rows, int64(share), num_shares, out)


def grouped_fp8_linear_signature(element: types.Type, code: types.Type = uint8) -> Any:
    weights = (code[:, :, ::1], float32[:, :, ::1], int64)
    return void(element[:, ::1], *weights, int32[::1], int64, int64, element[:, ::1])


@njit(**_HELPER)
def _fp8_share(
    x: Any, weight: Any, scales: Any, group: int, firsts: Any, most_rows: int, share: int, num_shares: int, out: Any
) -> None:
    """Multiplies rows x [P, K], sorted by expert, with the FP8 or int8 matrices weight [E, N, K] of their experts, for one share
    (`share` of num_shares) of the work, into out [P, N]. Experts with more than most_rows rows are left out. scales: [E, N, G].
    group: how many inputs share a scale. firsts [E + 1]: the first row of each expert."""
    num_experts, num_outputs = weight.shape[:2]
    mine = stripes_of_share(firsts, most_rows, (num_outputs + FP8_STRIPE - 1) // FP8_STRIPE, share, num_shares)
    no_bias = np.empty(0, x.dtype)
    for expert in range(num_experts):
        if mine[expert, 0] == mine[expert, 1]:
            continue
        own, to = x[firsts[expert] : firsts[expert + 1]], out[firsts[expert] : firsts[expert + 1]]
        for stripe in range(mine[expert, 0], mine[expert, 1]):
            output, output_end = stripe * FP8_STRIPE, min((stripe + 1) * FP8_STRIPE, num_outputs)
            fp8_stripe(own, weight[expert], scales[expert], group, no_bias, to, output, output_end)


def _grouped_fp8_linear(
    x: Any,  # [P, K]
    weight: Any,  # [E, N, K] codes, of FP8 or int8
    scales: Any,  # [E, N, G]
    group: int,  # inputs that share a scale
    firsts: Any,  # [E + 1] int32: the first row of each expert
    most_rows: int,  # experts with more rows are left out
    num_shares: int,  # number of shares that the work is cut into, one for each thread
    out: Any,  # [P, N]
) -> None:
    for share in prange(num_shares):
        _fp8_share(x, weight, scales, group, firsts, most_rows, int64(share), num_shares, out)


def grouped_widened_linear_signature(element: types.Type) -> Any:
    matrices = (element[:, :, ::1], element[:, ::1])
    return void(element[:, ::1], *matrices, int32[::1], int64, float32[::1], int64, element[:, ::1])


def widened_scratch_floats(num_rows: int, num_inputs: int, num_shares: int) -> int:
    """Returns how many float32 of scratch grouped_widened_linear needs for num_rows rows of num_inputs inputs: the widened inputs,
    and the work space of each of num_shares shares."""
    return num_rows * padded_inputs(num_inputs) + num_shares * STRIPE_FLOATS


@njit(**_HELPER)
def _widen(x: Any, weight: Any, firsts: Any, most_rows: int, expert: int, words: Any) -> None:
    """Widens an expert's rows of x [P, K] to float32, into their place in words (the widened rows of all experts, end to end). An
    expert with more than most_rows rows is skipped. weight: read for its element type alone, which decides the order
    (widened_linear.widen_rows)."""
    num_rows, first, width = _rows_of(firsts, expert, most_rows), firsts[expert], padded_inputs_of(x.shape[1])
    if num_rows:
        widen_rows(x[first : first + num_rows], weight[expert], words[first * width :])


@njit(**_HELPER)
def _widened_share(
    x: Any, weight: Any, bias: Any, firsts: Any, most_rows: int, words: Any, share: int, num_shares: int, out: Any
) -> None:
    """Multiplies rows, sorted by expert, with the bfloat16 matrices weight [E, N, K] of their experts in float32 and adds the
    biases, for one share (`share` of num_shares) of the work, into out [P, N]. Experts with more than most_rows rows are left out.

    words: the inputs x [P, K], widened to float32, then each share's work space. x: read for its width K alone. bias: [E, N], or
    [E, 0] for none. firsts [E + 1]: the first row of each expert."""
    num_experts, num_outputs = weight.shape[:2]
    mine = stripes_of_share(firsts, most_rows, (num_outputs + WIDENED_STRIPE - 1) // WIDENED_STRIPE, share, num_shares)
    none, width = np.empty(0, np.float32), padded_inputs_of(x.shape[1])
    sums = words[words.shape[0] - STRIPE_FLOATS * (num_shares - share) :]
    for expert in range(num_experts):
        if mine[expert, 0] == mine[expert, 1]:
            continue
        own, to = words[firsts[expert] * width :], out[firsts[expert] : firsts[expert + 1]]
        num_tiles = widened_tiles(to.shape[0])
        for stripe in range(mine[expert, 0], mine[expert, 1]):
            output, output_end = stripe * WIDENED_STRIPE, min((stripe + 1) * WIDENED_STRIPE, num_outputs)
            widened_stripe(own, num_tiles, weight[expert], none, bias[expert], sums, to, output, output_end)


def _grouped_widened_linear(
    x: Any,  # [P, K] bfloat16 bits
    weight: Any,  # [E, N, K] bfloat16 bits
    bias: Any,  # [E, N], or [E, 0] for none
    firsts: Any,  # [E + 1] int32: the first row of each expert
    most_rows: int,  # experts with more rows are left out; widened_linear.FEW_ROWS at most
    words: Any,  # [widened_scratch_floats]
    num_shares: int,  # number of shares that the work is cut into, one for each thread
    out: Any,  # [P, N]
) -> None:
    for expert in prange(weight.shape[0]):
        _widen(x, weight, firsts, most_rows, int64(expert), words)
    for share in prange(num_shares):
        _widened_share(x, weight, bias, firsts, most_rows, words, int64(share), num_shares, out)


grouped_linear_serial = njit(**_OPTIONS)(_grouped_linear)
grouped_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_grouped_linear_parallel", _grouped_linear))
grouped_widened_linear_serial = njit(**_OPTIONS)(_grouped_widened_linear)
grouped_widened_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_grouped_widened_parallel", _grouped_widened_linear))
grouped_fp8_linear_serial = njit(**_OPTIONS)(_grouped_fp8_linear)
grouped_fp8_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_grouped_fp8_linear_parallel", _grouped_fp8_linear))
