"""Products of one to four rows with a bfloat16 weight matrix on the CPU (Numba): so few that reading the weights is all
that counts.

Shapes: R rows, K inputs, N outputs. Twin: torch's linear, which reads the weights at half the speed for such rows.
"""

from __future__ import annotations

from typing import Any

from numba import float32, njit, prange, uint16, void

from engine.kernels.cpu_bits import FASTMATH, named, narrow, widen

_STRIPE = 64  # outputs a thread takes at a time
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
SIGNATURE = void(uint16[:, ::1], uint16[:, ::1], uint16[::1], uint16[:, ::1])
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}


# One loop for each number of rows, so that the sums stay in registers.


@njit(**_HELPER)
def _one_row(x: Any, weight: Any, bias: Any, out: Any, begin: int, end: int) -> None:
    first = x[0]
    for n in range(begin, end):
        row = weight[n]
        a = float32(0.0)
        for k in range(row.shape[0]):
            a += widen(first[k]) * widen(row[k])
        added = widen(bias[n]) if bias.shape[0] > 0 else float32(0.0)
        out[0, n] = narrow(a + added, row[0])


@njit(**_HELPER)
def _two_rows(x: Any, weight: Any, bias: Any, out: Any, begin: int, end: int) -> None:
    first, second = x[0], x[1]
    for n in range(begin, end):
        row = weight[n]
        a, b = float32(0.0), float32(0.0)
        for k in range(row.shape[0]):
            w = widen(row[k])
            a += widen(first[k]) * w
            b += widen(second[k]) * w
        added = widen(bias[n]) if bias.shape[0] > 0 else float32(0.0)
        out[0, n] = narrow(a + added, row[0])
        out[1, n] = narrow(b + added, row[0])


@njit(**_HELPER)
def _three_rows(x: Any, weight: Any, bias: Any, out: Any, begin: int, end: int) -> None:
    first, second, third = x[0], x[1], x[2]
    for n in range(begin, end):
        row = weight[n]
        a, b, c = float32(0.0), float32(0.0), float32(0.0)
        for k in range(row.shape[0]):
            w = widen(row[k])
            a += widen(first[k]) * w
            b += widen(second[k]) * w
            c += widen(third[k]) * w
        added = widen(bias[n]) if bias.shape[0] > 0 else float32(0.0)
        out[0, n] = narrow(a + added, row[0])
        out[1, n] = narrow(b + added, row[0])
        out[2, n] = narrow(c + added, row[0])


@njit(**_HELPER)
def _four_rows(x: Any, weight: Any, bias: Any, out: Any, begin: int, end: int) -> None:
    first, second, third, fourth = x[0], x[1], x[2], x[3]
    for n in range(begin, end):
        row = weight[n]
        a, b, c, d = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
        for k in range(row.shape[0]):
            w = widen(row[k])
            a += widen(first[k]) * w
            b += widen(second[k]) * w
            c += widen(third[k]) * w
            d += widen(fourth[k]) * w
        added = widen(bias[n]) if bias.shape[0] > 0 else float32(0.0)
        out[0, n] = narrow(a + added, row[0])
        out[1, n] = narrow(b + added, row[0])
        out[2, n] = narrow(c + added, row[0])
        out[3, n] = narrow(d + added, row[0])


def _few_rows_linear(
    x: Any,  # [R, K]
    weight: Any,  # [N, K]
    bias: Any,  # [N], or [0] for none
    out: Any,  # [R, N]
) -> None:
    num_outputs = weight.shape[0]
    for stripe in prange((num_outputs + _STRIPE - 1) // _STRIPE):
        begin, end = stripe * _STRIPE, min((stripe + 1) * _STRIPE, num_outputs)
        if x.shape[0] == 1:
            _one_row(x, weight, bias, out, begin, end)
        elif x.shape[0] == 2:
            _two_rows(x, weight, bias, out, begin, end)
        elif x.shape[0] == 3:
            _three_rows(x, weight, bias, out, begin, end)
        else:
            _four_rows(x, weight, bias, out, begin, end)


few_rows_linear_serial = njit(**_OPTIONS)(_few_rows_linear)
few_rows_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_few_rows_linear_parallel", _few_rows_linear))
