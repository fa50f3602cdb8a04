"""Products with weights on the CPU's matrix unit: bfloat16, or int8 with x rounded to two digits (engine/kernels/cpu_int8.py).

Inputs are interleaved once, all threads together. Then each thread takes panels of 32 outputs; of these a piece is read from memory
once and stays in the second-level cache for all rows, while the next panel's is fetched. Shapes: R rows, K inputs (a multiple of
32; of 64 for int8), N outputs (32 at least), S steps of 64 bytes of K, C tiles of 16 columns (engine/kernels/cpu_amx_tiles.py).
Twins: torch's linear, reference.int8_linear.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int8, int32, njit, prange, types, void

from engine.kernels.cpu_amx import configure_tiles, release_tiles, tile_configuration
from engine.kernels.cpu_amx_tiles import (
    PANEL,
    STEP_BYTES,
    TILE,
    TILE_WORDS,
    interleave,
    tile_products,
    write_tile,
)
from engine.kernels.cpu_bits import FASTMATH, named, widen
from engine.kernels.cpu_int8 import split, unit_of

_CONFIGURATION = tile_configuration()
_STRIPE = 4 * PANEL  # outputs a thread takes at a time
# Steps of a piece: two panels' (current and next) are 512 KiB, and all columns' a megabyte at most.
_PIECE_STEPS, _COLUMN_STEPS = 64, 1024
_APART = 16  # tiles from which on threads interleave inputs together
_PAIR_WORDS = 4 * TILE_WORDS  # sums of a panel and two columns
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_one_column, _two_columns = tile_products(1), tile_products(2)


@njit(fastmath=FASTMATH, error_model="numpy")
def _factors(scale: Any, bias: Any, at: int, factors: Any) -> None:
    """Of a panel's outputs: scales, then biases."""
    for n in range(PANEL):
        factors[n] = scale[at + n] if scale.shape[0] > 0 else float32(1.0)
        factors[PANEL + n] = widen(bias[at + n]) if bias.shape[0] > 0 else float32(0.0)


@njit(fastmath=FASTMATH, error_model="numpy")
def _write(
    weight: Any, sums: Any, sums_at: int, units: Any, factors: Any, at: int, column: int, num_columns: int, out: Any
) -> None:
    """Sums of a panel and num_columns columns to out; of int8 weights the columns are both digits of the same rows."""
    digits = 2 if weight.itemsize == 1 else 1
    num_rows, num_outputs = out.shape
    for half in range(2):
        for tile in range(num_columns // digits):
            row = TILE * (column // digits + tile)
            place = sums_at + (half * num_columns + tile) * TILE_WORDS
            out_at = row * num_outputs + at + TILE * half
            count = min(TILE, num_rows - row)
            write_tile(weight, sums, place, units, row, factors, TILE * half, count, out, out_at, num_outputs)


@njit(fastmath=FASTMATH, error_model="numpy")
def _stripe(
    words: Any, columns: int, units: Any, weight: Any, scale: Any, bias: Any, sums: Any, out: Any, begin: int, end: int
) -> None:
    """Outputs from begin to below end. words [C, S, 16, 16]; sums: a stripe's, float32, or int32 of int8 weights."""
    num_outputs, width = weight.shape
    steps, step = width * weight.itemsize // STEP_BYTES, STEP_BYTES // weight.itemsize
    at_once = max(1, min(_PIECE_STEPS, _COLUMN_STEPS // columns))
    num_pieces = (steps + at_once - 1) // at_once
    piece = (steps + num_pieces - 1) // num_pieces
    panels, pairs = (end - begin + PANEL - 1) // PANEL, (columns + 1) // 2
    factors = np.empty(2 * PANEL, np.float32)
    configure_tiles(_CONFIGURATION)
    for first in range(0, steps, piece):
        count = min(piece, steps - first)
        for panel in range(panels):
            output = min(begin + PANEL * panel, num_outputs - PANEL)  # the last panel may overlap the one before
            at = output * width + first * step
            ahead = PANEL * width
            if panel + 1 == panels:  # next is this stripe's next piece, or the next stripe
                ahead = begin * width + (first + piece) * step - at if first + piece < steps else ahead - first * step
            _factors(scale, bias, output, factors)
            for pair in range(pairs):
                fetch_from, fetch_to = PANEL * pair // pairs, PANEL * (pair + 1) // pairs
                words_at, apart = (2 * pair * steps + first) * TILE_WORDS, steps * TILE_WORDS
                sums_at = (panel * pairs + pair) * _PAIR_WORDS if num_pieces > 1 else 0
                num_columns = min(2, columns - 2 * pair)
                places = (count, first == 0, ahead, fetch_from, fetch_to)
                if num_columns == 2:
                    _two_columns(weight, at, width, words, words_at, apart, *places, sums, sums_at)
                else:
                    _one_column(weight, at, width, words, words_at, apart, *places, sums, sums_at)
                if first + count == steps:
                    _write(weight, sums, sums_at, units, factors, output, 2 * pair, num_columns, out)
    release_tiles()


@njit(fastmath=FASTMATH, error_model="numpy")
def _pack(inputs: Any, tile: int, step: int, words: Any) -> None:
    """A step of 16 rows of inputs [R, words of K]."""
    num_rows, width = inputs.shape
    begin, count = TILE * (tile * width + step), min(TILE, num_rows - TILE * tile)
    interleave(inputs, begin, width, count, words, (tile * (width // TILE) + step) * TILE_WORDS)


@njit(fastmath=FASTMATH, error_model="numpy")
def _split_and_pack(x: Any, units: Any, tile: int, step: int, words: Any) -> None:
    """Digits of 16 rows of x [R, K] in elements 64 step to 64 step + 63: high ones to column 2 tile, low ones to the next."""
    num_rows, width = x.shape
    digits = np.empty((2, TILE, STEP_BYTES), np.int8)
    count = min(TILE, num_rows - TILE * tile)
    for r in range(count):
        row = TILE * tile + r
        split(x[row], STEP_BYTES * step, STEP_BYTES * (step + 1), units[row], digits[0, r], digits[1, r])
    for digit in range(2):
        place = ((2 * tile + digit) * (width // STEP_BYTES) + step) * TILE_WORDS
        interleave(digits[digit].view(np.int32), 0, TILE, count, words, place)


def amx_linear_signature(element: types.Type) -> Any:
    return void(int32[:, ::1], element[:, ::1], element[::1], int32[::1], element[:, ::1])


def _amx_linear(
    inputs: Any,  # [R, K / 2] int32: x, two elements a word
    weight: Any,  # [N, K] bfloat16 bits
    bias: Any,  # [N], or [0] for none
    words: Any,  # [16 C K / 2]: scratch
    out: Any,  # [R, N]
) -> None:
    num_rows, num_outputs = out.shape
    tiles, steps = (num_rows + TILE - 1) // TILE, inputs.shape[1] // TILE
    none = np.empty(0, np.float32)
    if tiles * steps >= _APART:
        for place in prange(tiles * steps):
            _pack(inputs, place // steps, place % steps, words)
    else:
        for place in range(tiles * steps):
            _pack(inputs, place // steps, place % steps, words)
    for stripe in prange((num_outputs + _STRIPE - 1) // _STRIPE):
        sums = np.empty((_STRIPE // PANEL) * ((tiles + 1) // 2) * _PAIR_WORDS, np.float32)
        begin = stripe * _STRIPE
        _stripe(words, tiles, none, weight, none, bias, sums, out, begin, min(begin + _STRIPE, num_outputs))


def amx_int8_linear_signature(element: types.Type) -> Any:
    return void(element[:, ::1], int8[:, ::1], float32[::1], element[::1], int32[::1], element[:, ::1])


def _amx_int8_linear(
    x: Any,  # [R, K]
    weight: Any,  # [N, K] int8
    scale: Any,  # [N]: of each output's weights
    bias: Any,  # [N], or [0] for none
    words: Any,  # [16 C K / 2]: scratch
    out: Any,  # [R, N]
) -> None:
    num_rows, num_outputs = out.shape
    tiles, steps = (num_rows + TILE - 1) // TILE, x.shape[1] // STEP_BYTES
    units = np.zeros(tiles * TILE, np.float32)  # of no row too: what lies in memory could be tiny, and slow to multiply with
    if tiles * steps >= _APART:
        for row in prange(num_rows):
            units[row] = unit_of(x[row])
        for place in prange(tiles * steps):
            _split_and_pack(x, units, place // steps, place % steps, words)
    else:
        for row in range(num_rows):
            units[row] = unit_of(x[row])
        for place in range(tiles * steps):
            _split_and_pack(x, units, place // steps, place % steps, words)
    for stripe in prange((num_outputs + _STRIPE - 1) // _STRIPE):
        sums = np.empty((_STRIPE // PANEL) * tiles * _PAIR_WORDS, np.int32)
        begin = stripe * _STRIPE
        _stripe(words, 2 * tiles, units, weight, scale, bias, sums, out, begin, min(begin + _STRIPE, num_outputs))


amx_linear_serial = njit(**_OPTIONS)(_amx_linear)
amx_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_amx_linear_parallel", _amx_linear))
amx_int8_linear_serial = njit(**_OPTIONS)(_amx_int8_linear)
amx_int8_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_amx_int8_linear_parallel", _amx_int8_linear))
