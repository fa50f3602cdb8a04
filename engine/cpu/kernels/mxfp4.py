"""Products with weights in MXFP4 (Numba): of rows that are sorted by expert with the matrices of their experts, for few rows of
each; and the widening of matrices for many rows, which other kernels then multiply.

Weights are read once, as they are stored, and widened in registers (mxfp4_tiles.py). Work is shared as in grouped_linear.py.

Shapes: P rows, E experts, K inputs (a multiple of 32), N outputs (a multiple of 32), G = K / 32 groups of inputs.
Reference implementations: reference.experts, reference.mxfp4_values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, int64, njit, prange, types, uint8, void
from numba.extending import overload

from engine.cpu.kernels.bits import FASTMATH, named, narrow, widen
from engine.cpu.kernels.grouped_linear import stripes_of_share
from engine.cpu.kernels.mxfp4_tiles import (
    GROUP,
    GROUP_BYTES,
    OUTPUTS,
    ROWS,
    mxfp4_tile,
    spread_group,
    takes_pairs,
    widen_group,
    write_factors,
)

_STRIPE = 32  # outputs a thread takes at a time
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}
_one_row, _two_rows, _three_rows, _four_rows = (mxfp4_tile(min(num_rows, ROWS)) for num_rows in (1, 2, 3, 4))


@njit(**_HELPER)
def _spread_rows(x: Any, rows: Any) -> None:
    for row in range(x.shape[0]):
        for k in range(0, x.shape[1], GROUP):
            spread_group(x, row * x.shape[1] + k, rows, row * x.shape[1] + k)


def _rows_for_tiles(x: Any) -> Any:
    """Returns rows [R, K] as mxfp4_tile takes them: themselves, or spread in float32."""


@overload(_rows_for_tiles, jit_options=_HELPER)
def _rows_for_tiles_of(x: Any) -> Any:
    if takes_pairs(x.dtype):

        def as_they_are(x: Any) -> Any:
            return x

        return as_they_are

    def spread(x: Any) -> Any:
        rows = np.empty(x.shape, np.float32)
        _spread_rows(x, rows)
        return rows

    return spread


@njit(**_HELPER)
def _multiply(num_rows: int, x: Any, x_at: int, blocks: Any, at: int, factors: Any, groups: int, ahead: int, folded: Any) -> int:
    """Multiplies some of the next num_rows rows with a panel's weights. Returns how many."""
    if num_rows == 1 or ROWS == 1:
        _one_row(x, x_at, blocks, at, factors, groups, ahead, folded)
        return 1
    if num_rows == 2:
        _two_rows(x, x_at, blocks, at, factors, groups, ahead, folded)
        return 2
    if num_rows == 3:
        _three_rows(x, x_at, blocks, at, factors, groups, ahead, folded)
        return 3
    _four_rows(x, x_at, blocks, at, factors, groups, ahead, folded)
    return 4


@njit(**_HELPER)
def _stripe(rows: Any, blocks: Any, scales: Any, bias: Any, at: int, factors: Any, folded: Any, begin: int, out: Any) -> None:
    """Computes _STRIPE outputs from `begin` on of an expert's rows. at: the index of the expert's first output among all experts'.
    bias: [N], or [0] for none."""
    num_rows, groups = rows.shape[0], rows.shape[1] // GROUP
    panel_bytes = OUTPUTS * groups * GROUP_BYTES
    for output in range(begin, begin + _STRIPE, OUTPUTS):
        write_factors(scales, (at + output) * groups, OUTPUTS * groups, factors, 0)
        row = 0
        while row < num_rows:
            blocks_at, x_at = (at + output) * groups * GROUP_BYTES, row * rows.shape[1]
            done = _multiply(num_rows - row, rows, x_at, blocks, blocks_at, factors, groups, panel_bytes, folded)
            for r in range(done):
                for n in range(OUTPUTS):
                    total = folded[r * OUTPUTS + n]
                    if bias.shape[0] > 0:
                        total += widen(bias[output + n])
                    out[row + r, output + n] = narrow(total, out[0, 0])
            row += done


@njit(**_HELPER)
def _share(x: Any, blocks: Any, scales: Any, bias: Any, firsts: Any, most_rows: int, share: int, num_shares: int, out: Any) -> None:
    """Computes one share of the outputs of all experts."""
    num_experts, num_outputs = firsts.shape[0] - 1, out.shape[1]
    mine = stripes_of_share(firsts, most_rows, num_outputs // _STRIPE, share, num_shares)
    factors = np.empty(OUTPUTS * (x.shape[1] // GROUP), np.float32)
    folded = np.empty(ROWS * OUTPUTS, np.float32)
    for expert in range(num_experts):
        if mine[expert, 0] == mine[expert, 1]:
            continue
        own, to = x[firsts[expert] : firsts[expert + 1]], out[firsts[expert] : firsts[expert + 1]]
        rows = _rows_for_tiles(own)
        for stripe in range(mine[expert, 0], mine[expert, 1]):
            _stripe(rows, blocks, scales, bias[expert], expert * num_outputs, factors, folded, stripe * _STRIPE, to)


def grouped_mxfp4_linear_signature(element: types.Type) -> Any:
    return void(element[:, ::1], uint8[::1], uint8[::1], element[:, ::1], int32[::1], int64, int64, element[:, ::1])


def _grouped_mxfp4_linear(
    x: Any,  # [P, K]
    blocks: Any,  # [E * N * G * 16]
    scales: Any,  # [E * N * G]
    bias: Any,  # [E, N], or [E, 0] for none
    firsts: Any,  # [E + 1] int32: the first row of each expert
    most_rows: int,  # experts with more rows are left out
    num_shares: int,  # number of shares that the work is cut into, one for each thread
    out: Any,  # [P, N]
) -> None:
    for share in prange(num_shares):
        _share(x, blocks, scales, bias, firsts, most_rows, int64(share), num_shares, out)


def widen_mxfp4_signature(element: types.Type) -> Any:
    return void(uint8[::1], uint8[::1], element[:, ::1])


def _widen_mxfp4(
    blocks: Any,  # [N * G * 16]
    scales: Any,  # [N * G]
    out: Any,  # [N, K]
) -> None:
    num_outputs, groups = out.shape[0], out.shape[1] // GROUP
    for output in prange(num_outputs):
        factors = np.empty(groups, np.float32)
        write_factors(scales, output * groups, groups, factors, 0)
        for group in range(groups):
            place = output * groups + group
            widen_group(blocks, place * GROUP_BYTES, factors[group], out, place * GROUP)


grouped_mxfp4_linear_serial = njit(**_OPTIONS)(_grouped_mxfp4_linear)
grouped_mxfp4_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_grouped_mxfp4_parallel", _grouped_mxfp4_linear))
widen_mxfp4_serial = njit(**_OPTIONS)(_widen_mxfp4)
widen_mxfp4_parallel = njit(**_OPTIONS, parallel=True)(named("_widen_mxfp4_parallel", _widen_mxfp4))
