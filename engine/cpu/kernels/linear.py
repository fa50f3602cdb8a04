"""Multiplies a few rows with a weight matrix on the CPU (Numba). With so few rows, reading the weights takes most of the time.

Weights are read once, four outputs at a time, while those needed next are prefetched. Inputs are multiplied in pieces that stay in
the first-level cache.

Shapes: R rows, K inputs, N outputs (4 at least). Reference implementations: torch's linear, reference.int8_linear."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, njit, prange, types, void

from engine.cpu.kernels.bits import FASTMATH, named, narrow, widen
from engine.cpu.kernels.tiles import dot_tile, fold_sums
from engine.cpu.kernels.vectors import LANES

MIN_OUTPUTS = 4
STRIPE = 32  # outputs a thread takes at a time
_TILE = 4 * 4 * LANES  # partial sums of 4 rows and 4 outputs
_PIECE_BYTES = 32 << 10  # all rows' inputs that are used at a time
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_one_row, _two_rows, _three_rows, _four_rows = (dot_tile(num_rows, 4) for num_rows in (1, 2, 3, 4))


def few_rows_linear_signature(element: types.Type, weight: types.Type) -> Any:
    return void(element[:, ::1], weight[:, ::1], float32[::1], element[::1], element[:, ::1])


@njit(fastmath=FASTMATH, error_model="numpy")
def _add_tile(
    x: Any, x_at: int, num_rows: int, weight: Any, at: int, length: int, ahead: int, fetched: int, sums: Any, sums_at: int
) -> None:
    width = weight.shape[1]
    if num_rows >= 4:
        _four_rows(x, x_at, width, weight, at, width, length, ahead, fetched, sums, sums_at)
    elif num_rows == 3:
        _three_rows(x, x_at, width, weight, at, width, length, ahead, fetched, sums, sums_at)
    elif num_rows == 2:
        _two_rows(x, x_at, width, weight, at, width, length, ahead, fetched, sums, sums_at)
    else:
        _one_row(x, x_at, width, weight, at, width, length, ahead, fetched, sums, sums_at)


@njit(fastmath=FASTMATH, error_model="numpy")
def _write_outputs(folded: Any, num_rows: int, row: int, first: int, scale: Any, bias: Any, out: Any) -> None:
    """Writes folded [4 rows, 4 outputs], times scale and plus bias, to out [num_rows, N] from row `row` and output `first` on,
    without rows from num_rows on. scale, bias: [N], or [0] for none."""
    for r in range(min(4, num_rows - row)):
        for n in range(4):
            total = folded[4 * r + n]
            if scale.shape[0] > 0:
                total *= scale[first + n]
            if bias.shape[0] > 0:
                total += widen(bias[first + n])
            out[row + r, first + n] = narrow(total, out[0, 0])


@njit(fastmath=FASTMATH, error_model="numpy")
def linear_stripe(x: Any, weight: Any, scale: Any, bias: Any, out: Any, begin: int, end: int) -> None:
    """Computes the outputs from begin to below end, for all rows: x [R, K] @ weight [N, K] transposed, times scale, plus bias.
    Writes them to the same columns of out [R, N]. scale, bias: [N], or [0] for none."""
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    row_tiles = (num_rows + 3) // 4
    fetched = (3 + row_tiles) // row_tiles  # each row tile prefetches its share of the next four outputs' weights
    num_pieces = max(1, (num_rows * num_inputs * x.itemsize + _PIECE_BYTES - 1) // _PIECE_BYTES)
    piece = ((num_inputs + num_pieces - 1) // num_pieces + 31) // 32 * 32
    panels = (end - begin + 3) // 4
    sums = np.zeros(panels * row_tiles * _TILE, np.float32)
    folded = np.empty(LANES, np.float32)
    for k in range(0, num_inputs, piece):
        length = min(piece, num_inputs - k)
        for panel in range(panels):
            at = min(begin + 4 * panel, num_outputs - 4) * num_inputs + k  # the last four outputs may overlap those before
            if panel + 1 < panels or k + piece >= num_inputs:  # prefetch the next four outputs' weights
                next_at = at + 4 * num_inputs - (k if panel + 1 == panels else 0)
            else:  # or this stripe's next piece of the inputs
                next_at = begin * num_inputs + k + piece
            for tile in range(row_tiles):
                ahead = next_at - at + min(tile * fetched, 3) * num_inputs
                sums_at = (panel * row_tiles + tile) * _TILE
                _add_tile(x, 4 * tile * num_inputs + k, num_rows - 4 * tile, weight, at, length, ahead, fetched, sums, sums_at)
    for panel in range(panels):
        for tile in range(row_tiles):
            fold_sums(sums, (panel * row_tiles + tile) * _TILE, folded)
            _write_outputs(folded, num_rows, 4 * tile, min(begin + 4 * panel, num_outputs - 4), scale, bias, out)


def _few_rows_linear(
    x: Any,  # [R, K]
    weight: Any,  # [N, K]
    scale: Any,  # [N] float32: the scale of each output's weights, or [0] for none
    bias: Any,  # [N], or [0] for none
    out: Any,  # [R, N]
) -> None:
    num_outputs = weight.shape[0]
    for stripe in prange((num_outputs + STRIPE - 1) // STRIPE):
        linear_stripe(x, weight, scale, bias, out, stripe * STRIPE, min((stripe + 1) * STRIPE, num_outputs))


few_rows_linear_serial = njit(**_OPTIONS)(_few_rows_linear)
few_rows_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_few_rows_linear_parallel", _few_rows_linear))
