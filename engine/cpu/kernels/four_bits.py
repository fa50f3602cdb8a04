"""Computes products with weights of four bits (MXFP4, NVFP4 or INT4) on the CPU (Numba). One kernel multiplies few rows, which are
sorted by expert, with the matrices of their experts. Another widens such matrices for many rows, which other kernels then multiply.
A matrix outside of a mixture of experts is passed as the matrix of a single expert.

Weights are read once, as they are stored, and widened in registers (four_bits_tiles.py). Work is shared as in grouped_linear.py.

Shapes: P rows, E experts, K inputs (a multiple of 32), N outputs (4 at least), G scales of an output. Reference implementations:
reference.experts, reference.mxfp4_values, reference.nvfp4_rows, reference.int4_rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, int32, int64, njit, prange, types, uint8, void
from numba.extending import overload

from engine.cpu.kernels.bits import FASTMATH, named, narrow, widen
from engine.cpu.kernels.four_bits_tiles import (
    GROUP,
    GROUP_BYTES,
    OUTPUTS,
    ROWS,
    four_bits_tile,
    is_nvfp4,
    moves_exponents,
    spread_group,
    takes_pairs,
    widen_group,
    write_exponents,
    write_factors,
)
from engine.cpu.kernels.grouped_linear import stripes_of_share

_STRIPE = 32  # outputs a thread takes at a time
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}
_one_row, _two_rows, _three_rows, _four_rows = (four_bits_tile(min(num_rows, ROWS)) for num_rows in (1, 2, 3, 4))


@njit(**_HELPER)
def _spread_rows(x: Any, rows: Any) -> None:
    for row in range(x.shape[0]):
        for k in range(0, x.shape[1], GROUP):
            spread_group(x, row * x.shape[1] + k, rows, row * x.shape[1] + k)


def _rows_for_tiles(x: Any) -> Any:
    """Returns rows [R, K] in the form that four_bits_tile takes: bfloat16 unchanged if the processor multiplies bfloat16, else a
    float32 copy in the order of spread_group. Numba compiles a call of this function as _rows_for_tiles_of says."""


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


def _weigh(factors: Any, num: int, scales: Any, zeros: Any, output: int) -> None:
    """Multiplies the factors in `factors`, `num` for each output from number `output` on, by the output's own factor in zeros, if
    the weights are NVFP4; does nothing for other formats. Numba compiles a call of this function as _weigh_of says."""


@overload(_weigh, jit_options=_HELPER)
def _weigh_of(factors: Any, num: int, scales: Any, zeros: Any, output: int) -> Any:
    if not is_nvfp4(scales):

        def leave(factors: Any, num: int, scales: Any, zeros: Any, output: int) -> None:
            return

        return leave

    def multiply(factors: Any, num: int, scales: Any, zeros: Any, output: int) -> None:
        for n in range(factors.shape[0] // num):
            own = zeros[output + n]
            for k in range(num):
                factors[n * num + k] *= own

    return multiply


def _write_for_tiles(rows: Any, scales: Any, zeros: Any, halves: bool, output: int, num: int, factors: Any) -> None:
    """Writes the factors of OUTPUTS outputs, from number `output` on, to `factors`, in the form that four_bits_tile takes for these
    rows. num: number of factors of each output. Numba compiles a call of this function as _write_for_tiles_of says."""


@overload(_write_for_tiles, jit_options=_HELPER)
def _write_for_tiles_of(rows: Any, scales: Any, zeros: Any, halves: bool, output: int, num: int, factors: Any) -> Any:
    if moves_exponents(rows.dtype, scales):

        def write_moves(rows: Any, scales: Any, zeros: Any, halves: bool, output: int, num: int, factors: Any) -> None:
            write_exponents(scales, output * num, OUTPUTS * num, factors)

        return write_moves

    def write(rows: Any, scales: Any, zeros: Any, halves: bool, output: int, num: int, factors: Any) -> None:
        write_factors(scales, output * num, OUTPUTS * num, halves, factors, 0)
        _weigh(factors, num, scales, zeros, output)

    return write


@njit(**_HELPER)
def _shift(group: int, num_inputs: int) -> int:
    """Returns a number of bits s, so that the scale of group number g of 32 inputs is number g >> s. group: how many inputs share a
    scale: a power of two from 32 on, or num_inputs, for which g >> s is always 0. For 16 (NVFP4, where a group has two scales) the
    result is 0 and not used."""
    if group >= num_inputs:
        return 63
    shift = 0
    while GROUP << shift < group:
        shift += 1
    return shift


@njit(**_HELPER)
def _multiply(
    num_rows: int,
    x: Any,
    x_at: int,
    blocks: Any,
    at: int,
    scales: Any,
    zeros: Any,
    zeros_at: int,
    factors: Any,
    num_factors: int,
    shift: int,
    groups: int,
    ahead: int,
    folded: Any,
) -> int:
    """Multiplies up to 4 of the num_rows rows of x, from index x_at on, with the four-bit weights of OUTPUTS outputs, and writes
    the results to folded. Returns the number of rows that were multiplied. blocks, at: the weights' bytes, and the index of the
    first of them. scales, zeros, factors: the weights' scales and zero points, and the factors made of the scales. four_bits_tile
    explains their order and the remaining parameters."""
    if num_rows == 1 or ROWS == 1:
        _one_row(x, x_at, blocks, at, scales, zeros, zeros_at, factors, num_factors, shift, groups, ahead, folded)
        return 1
    if num_rows == 2:
        _two_rows(x, x_at, blocks, at, scales, zeros, zeros_at, factors, num_factors, shift, groups, ahead, folded)
        return 2
    if num_rows == 3:
        _three_rows(x, x_at, blocks, at, scales, zeros, zeros_at, factors, num_factors, shift, groups, ahead, folded)
        return 3
    _four_rows(x, x_at, blocks, at, scales, zeros, zeros_at, factors, num_factors, shift, groups, ahead, folded)
    return 4


@njit(**_HELPER)
def _stripe(
    rows: Any,
    blocks: Any,
    scales: Any,
    zeros: Any,
    group: int,
    halves: bool,
    bias: Any,
    at: int,
    factors: Any,
    folded: Any,
    begin: int,
    out: Any,
) -> None:
    """Multiplies one expert's rows [R, K] with the expert's four-bit weights and adds the bias, for up to _STRIPE outputs from
    `begin` on, into out [R, N].

    blocks, scales, zeros: the weights' bytes, scales and zero points, of all experts. group: how many inputs share a scale. at: the
    index of the expert's first output among all experts' outputs. bias: [N], or [0] for none. factors [OUTPUTS * G] and folded
    [ROWS * OUTPUTS] are work space. halves: whether scales of 16 bits are float16; False: bfloat16."""
    num_rows, groups = rows.shape[0], rows.shape[1] // GROUP
    num_factors, shift = factors.shape[0] // OUTPUTS, _shift(group, rows.shape[1])
    panel_bytes = OUTPUTS * groups * GROUP_BYTES
    for panel in range(begin, min(begin + _STRIPE, out.shape[1]), OUTPUTS):
        output = min(panel, out.shape[1] - OUTPUTS)  # the last outputs may overlap those before
        scales_at = (at + output) * num_factors
        _write_for_tiles(rows, scales, zeros, halves, at + output, num_factors, factors)
        of_weights = (factors, num_factors, shift, groups, panel_bytes, folded)
        row = 0
        while row < num_rows:
            left, x_at, blocks_at = num_rows - row, row * rows.shape[1], (at + output) * groups * GROUP_BYTES
            done = _multiply(left, rows, x_at, blocks, blocks_at, scales, zeros, scales_at, *of_weights)
            for r in range(done):
                for n in range(OUTPUTS):
                    total = folded[r * OUTPUTS + n]
                    if bias.shape[0] > 0:
                        total += widen(bias[output + n])
                    out[row + r, output + n] = narrow(total, out[0, 0])
            row += done


@njit(**_HELPER)
def _share(
    x: Any,
    blocks: Any,
    scales: Any,
    zeros: Any,
    group: int,
    halves: bool,
    bias: Any,
    firsts: Any,
    most_rows: int,
    share: int,
    num_shares: int,
    out: Any,
) -> None:
    """Multiplies rows x [P, K], sorted by expert, with the four-bit matrices [N, K] of their E experts and adds the biases, for one
    share (`share` of num_shares) of the work, into out [P, N]. Experts with more than most_rows rows are left out.

    blocks, scales, zeros: the weights' bytes, scales and zero points, of all experts. group: how many inputs share a scale. halves:
    whether scales of 16 bits are float16; False: bfloat16. bias: [E, N], or [E, 0] for none. firsts [E + 1]: the first row of each
    expert."""
    num_experts, num_outputs = firsts.shape[0] - 1, out.shape[1]
    mine = stripes_of_share(firsts, most_rows, (num_outputs + _STRIPE - 1) // _STRIPE, share, num_shares)
    factors = np.empty(OUTPUTS * (x.shape[1] // group), np.float32)
    folded = np.empty(ROWS * OUTPUTS, np.float32)
    for expert in range(num_experts):
        if mine[expert, 0] == mine[expert, 1]:
            continue
        own, to = x[firsts[expert] : firsts[expert + 1]], out[firsts[expert] : firsts[expert + 1]]
        rows = _rows_for_tiles(own)
        for stripe in range(mine[expert, 0], mine[expert, 1]):
            first, begin = expert * num_outputs, stripe * _STRIPE
            _stripe(rows, blocks, scales, zeros, group, halves, bias[expert], first, factors, folded, begin, to)


def grouped_four_bits_linear_signature(element: types.Type, scale: types.Type, zero: types.Type) -> Any:
    weights = (scale[::1], uint8[::1], zero[::1], int64, boolean)
    return void(element[:, ::1], *weights, element[:, ::1], int32[::1], int64, int64, element[:, ::1])


def _grouped_four_bits_linear(
    x: Any,  # [P, K]
    scales: Any,  # [E * N * G]: uint8 of MXFP4, int8 of NVFP4, uint16 of INT4
    blocks: Any,  # [E * N * K / 2]
    zeros: Any,  # [E * N * G] uint8: zero points; int8: there are none, and all are 8; [E * N] float32: factors of NVFP4
    group: int,  # inputs that share a scale: 16 of NVFP4, else a power of two from 32 on, or K
    halves: bool,  # scales of 16 bits are float16, else bfloat16
    bias: Any,  # [E, N], or [E, 0] for none
    firsts: Any,  # [E + 1] int32: the first row of each expert
    most_rows: int,  # experts with more rows are left out
    num_shares: int,  # number of shares that the work is cut into, one for each thread
    out: Any,  # [P, N]
) -> None:
    for share in prange(num_shares):
        _share(x, blocks, scales, zeros, group, halves, bias, firsts, most_rows, int64(share), num_shares, out)


def widen_four_bits_signature(element: types.Type, scale: types.Type, zero: types.Type) -> Any:
    return void(scale[::1], uint8[::1], zero[::1], int64, boolean, element[:, ::1])


def _widen_four_bits(
    scales: Any,  # [N * G]: uint8 of MXFP4, int8 of NVFP4, uint16 of INT4
    blocks: Any,  # [N * K / 2]
    zeros: Any,  # [N * G] or [N], as above
    group: int,  # inputs that share a scale, as above
    halves: bool,  # scales of 16 bits are float16, else bfloat16
    out: Any,  # [N, K]
) -> None:
    num_outputs, groups = out.shape[0], out.shape[1] // GROUP
    num_factors, shift = out.shape[1] // group, _shift(group, out.shape[1])
    for output in prange(num_outputs):
        factors = np.empty(num_factors, np.float32)
        write_factors(scales, output * num_factors, num_factors, halves, factors, 0)
        _weigh(factors, num_factors, scales, zeros, output)
        for number in range(groups):
            place, own = output * groups + number, number >> shift if group >= GROUP else number * (GROUP // group)
            of_scale = (zeros, output * num_factors + own, factors, own)
            widen_group(blocks, place * GROUP_BYTES, scales, *of_scale, out, place * GROUP)


grouped_four_bits_linear_serial = njit(**_OPTIONS)(_grouped_four_bits_linear)
grouped_four_bits_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_grouped_four_bits_parallel", _grouped_four_bits_linear))
widen_four_bits_serial = njit(**_OPTIONS)(_widen_four_bits)
widen_four_bits_parallel = njit(**_OPTIONS, parallel=True)(named("_widen_four_bits_parallel", _widen_four_bits))
