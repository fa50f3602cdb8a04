"""Multiplies a few rows with a packed matrix (loader/packed_rows.py) on the CPU, and unpacks such a matrix (Numba).

Results have the bits that vectors give with the plain matrix (linear.py, widened_linear.py). Where the processor allows it, weights
are decoded in the registers of the product's tile. Elsewhere a few outputs' weights at a time are decoded into memory that stays in
the caches, and multiplied there as plain ones.

Shapes: R rows, K inputs, N outputs, P panels of 4 outputs, B blocks of 64 inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, njit, prange, uint8, uint16, uint32, uint64, void

from engine.cpu.kernels.bits import FASTMATH, HAS_BFLOAT16_PRODUCTS, named, narrow, widen
from engine.cpu.kernels.linear import linear_stripe
from engine.cpu.kernels.packed_tiles import (
    HAS_EXPANSION,
    IS_FUSED,
    count_bits,
    lowest_bit,
    packed_tile,
    unpack_block,
)
from engine.cpu.kernels.vectors import LANES
from engine.cpu.kernels.widened_linear import STRIPE_FLOATS, padded_inputs_of, widen_rows, widened_stripe, widened_tiles
from loader.packed_rows import BLOCK, ORDER, PANEL_ROWS

MOST_ROWS = 4
_ORDER = np.array(ORDER)
_OUTPUTS = 12  # whose weights are unpacked at a time: whole panels, and whole tiles of widened_tiles.py
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}
_one_row, _two_rows, _three_rows, _four_rows = (packed_tile(num_rows) for num_rows in (1, 2, 3, 4))


@njit(**_HELPER)
def _unpack_panel(packed: Any, panel: int, blocks: int, num_inputs: int, last: Any, out: Any, first: int) -> None:
    """Writes the rows of a panel that out [.., K] has to its rows from `first` on. last: [BLOCK] uint16, work space."""
    body, codes, bases, starts, escapes = packed
    at = int64(starts[panel])
    rows = min(PANEL_ROWS, out.shape[0] - first)
    flat = out.reshape(-1)
    for block in range(blocks):
        k = block * BLOCK
        count = min(BLOCK, num_inputs - k)
        for n in range(PANEL_ROWS):
            number = (panel * blocks + block) * PANEL_ROWS + n
            to, to_at = (flat, (first + n) * num_inputs + k) if n < rows and count == BLOCK else (last, 0)
            escaped = unpack_block(body, codes, number, bases[panel * PANEL_ROWS + n], escapes, at, to, to_at)
            if HAS_EXPANSION:
                at += count_bits(escaped)
            else:
                while escaped != 0:
                    place = to_at + _ORDER[lowest_bit(escaped)]
                    to[place] = (to[place] & uint16(0x807F)) | uint16(uint16(escapes[at]) << uint16(7))
                    at += 1
                    escaped &= escaped - 1
            if n < rows and count < BLOCK:
                for i in range(count):
                    flat[(first + n) * num_inputs + k + i] = last[i]


@njit(**_HELPER)
def _fused_share(x: Any, packed: Any, bias: Any, words: Any, begin: int, end: int, out: Any) -> None:
    """Computes the outputs of the panels from begin to below end."""
    body, codes, bases, starts, escapes = packed
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    blocks = (num_inputs + BLOCK - 1) // BLOCK
    folded = np.empty(LANES, np.float32)
    for panel in range(begin, end):
        at = int64(starts[panel])
        if num_rows == 1:
            _one_row(x, num_inputs, body, codes, bases, panel, blocks, escapes, at, folded)
        elif num_rows == 2:
            _two_rows(x, num_inputs, body, codes, bases, panel, blocks, escapes, at, folded)
        elif num_rows == 3:
            _three_rows(x, num_inputs, body, codes, bases, panel, blocks, escapes, at, folded)
        else:
            _four_rows(x, num_inputs, body, codes, bases, panel, blocks, escapes, at, folded)
        first = panel * PANEL_ROWS
        for r in range(num_rows):
            for n in range(min(PANEL_ROWS, num_outputs - first)):
                total = folded[PANEL_ROWS * r + n]
                if bias.shape[0] > 0:
                    total += widen(bias[first + n])
                out[r, first + n] = narrow(total, out[0, 0])


@njit(**_HELPER)
def _unpacked_share(x: Any, packed: Any, bias: Any, words: Any, begin: int, end: int, out: Any) -> None:
    """Does what _fused_share does, with weights that are unpacked first."""
    num_rows, num_inputs = x.shape
    blocks = (num_inputs + BLOCK - 1) // BLOCK
    rows, last = np.zeros((_OUTPUTS, num_inputs), np.uint16), np.empty(BLOCK, np.uint16)
    results, no_bias, no_scale = np.empty((num_rows, _OUTPUTS), np.uint16), np.empty(0, np.uint16), np.empty(0, np.float32)
    sums = np.empty(STRIPE_FLOATS, np.float32)
    for panel in range(begin, end, _OUTPUTS // PANEL_ROWS):
        first = panel * PANEL_ROWS
        count = min(_OUTPUTS, min(end * PANEL_ROWS, out.shape[1]) - first)
        for one in range(min(_OUTPUTS // PANEL_ROWS, end - panel)):
            _unpack_panel(packed, panel + one, blocks, num_inputs, last, rows, one * PANEL_ROWS)
        added = no_bias
        if bias.shape[0] > 0:
            added = np.zeros(_OUTPUTS, np.uint16)
            added[:count] = bias[first : first + count]
        _multiply(x, words, rows, no_scale, added, sums, results)
        for r in range(num_rows):
            for n in range(count):
                out[r, first + n] = results[r, n]


@njit(**_HELPER)
def _multiply_pairs(x: Any, words: Any, weight: Any, scale: Any, bias: Any, sums: Any, out: Any) -> None:
    linear_stripe(x, weight, scale, bias, out, 0, weight.shape[0])


@njit(**_HELPER)
def _multiply_widened(x: Any, words: Any, weight: Any, scale: Any, bias: Any, sums: Any, out: Any) -> None:
    widened_stripe(words, widened_tiles(x.shape[0]), weight, scale, bias, sums, out, 0, weight.shape[0])


@njit(**_HELPER)
def _no_words(x: Any) -> Any:
    return np.empty(0, np.float32)


@njit(**_HELPER)
def _widened(x: Any) -> Any:
    """Returns the rows as widened_stripe takes them."""
    words = np.empty(x.shape[0] * padded_inputs_of(x.shape[1]), np.float32)
    widen_rows(x, x, words)
    return words


_multiply, _words_of = (_multiply_pairs, _no_words) if HAS_BFLOAT16_PRODUCTS else (_multiply_widened, _widened)
_share = _fused_share if IS_FUSED else _unpacked_share
_PACKED = (uint8[::1], uint64[::1], uint8[::1], uint32[::1], uint8[::1])
PACKED_LINEAR = void(uint16[:, ::1], *_PACKED, uint16[::1], int64, uint16[:, ::1])
UNPACK_ROWS = void(*_PACKED, uint16[:, ::1])


def _packed_linear(
    x: Any,  # [R, K] bfloat16 bits; R is MOST_ROWS at most
    body: Any,  # [P * B * 256]
    codes: Any,  # [P * B * 12]
    bases: Any,  # [P * 4]
    starts: Any,  # [P + 1]
    escapes: Any,  # [E + 64]
    bias: Any,  # [N], or [0] for none
    num_shares: int,  # number of shares that the outputs are cut into, one for each thread
    out: Any,  # [R, N]
) -> None:
    panels = starts.shape[0] - 1
    words = _words_of(x)
    for share in prange(num_shares):
        begin, end = panels * share // num_shares, panels * (share + 1) // num_shares
        _share(x, (body, codes, bases, starts, escapes), bias, words, int64(begin), int64(end), out)


def _unpack_rows(
    body: Any,  # [P * B * 256]
    codes: Any,  # [P * B * 12]
    bases: Any,  # [P * 4]
    starts: Any,  # [P + 1]
    escapes: Any,  # [E + 64]
    out: Any,  # [N, K] bfloat16 bits
) -> None:
    num_inputs = out.shape[1]
    blocks = (num_inputs + BLOCK - 1) // BLOCK
    for panel in prange(starts.shape[0] - 1):
        last = np.empty(BLOCK, np.uint16)
        packed = (body, codes, bases, starts, escapes)
        _unpack_panel(packed, int64(panel), blocks, num_inputs, last, out, panel * PANEL_ROWS)


packed_linear_serial = njit(**_OPTIONS)(_packed_linear)
packed_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_packed_linear_parallel", _packed_linear))
unpack_rows_serial = njit(**_OPTIONS)(_unpack_rows)
unpack_rows_parallel = njit(**_OPTIONS, parallel=True)(named("_unpack_rows_parallel", _unpack_rows))
