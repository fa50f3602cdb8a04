"""Multiplies rows with a packed matrix (loader/formats/packed_rows.py) on the CPU, and packs and unpacks such a matrix (Numba).

The results have the same bits as those of the vector kernels (linear.py, widened_linear.py) with the plain matrix. If the processor
allows it, weights are decoded in the registers of the product's tile. Otherwise the weights of a few outputs at a time are decoded
into memory that stays in the caches, and multiplied there like plain weights.

Shapes: R rows, K inputs, N outputs, P panels of 4 outputs, B blocks of 64 inputs, E escapes (weights whose exponent has no code and
is stored apart)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, njit, prange, uint8, uint16, uint32, uint64, void

from engine.cpu.kernels.bits import FASTMATH, HAS_BFLOAT16_PRODUCTS, named, narrow, widen
from engine.cpu.kernels.linear import linear_stripe
from engine.cpu.kernels.packed_tiles import (
    HAS_EXPANSION,
    IS_FUSED,
    MOST_TILE_ROWS,
    count_bits,
    lowest_bit,
    outputs_of,
    pack_block,
    packed_tile,
    unpack_block,
)
from engine.cpu.kernels.vectors import LANES
from engine.cpu.kernels.widened_linear import STRIPE_FLOATS, padded_inputs_of, widen_rows, widened_stripe, widened_tiles
from loader.formats.packed_rows import BLOCK, ESCAPE, MOST_BASE, ORDER, PANEL_ROWS

MOST_ROWS = 16  # of a call; more are faster with a matrix that is unpacked for all of them
_ORDER = np.array(ORDER)
_OUTPUTS_OF = np.array([outputs_of(num_rows) for num_rows in range(MOST_TILE_ROWS + 1)])  # of a tile
_OUTPUTS = 12  # whose weights are unpacked at a time: whole panels, and whole tiles of widened_tiles.py
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}
_one_row, _two_rows, _three_rows, _four_rows = (packed_tile(num_rows) for num_rows in (1, 2, 3, 4))
_up_to_six, _up_to_eight = (packed_tile(num_rows) for num_rows in (6, 8))


@njit(**_HELPER)
def _unpack_panel(packed: Any, panel: int, blocks: int, num_inputs: int, last: Any, out: Any, first: int) -> None:
    """Unpacks a panel, and writes its rows to the rows of out [.., K] from number `first` on, except for those beyond the end of
    out. blocks: number of blocks of a row. last: [BLOCK] uint16, work space."""
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
    """Computes x [R, K] @ a packed matrix [N, K] transposed, plus bias, for all rows and for the outputs of the panels from begin
    to below end, into the columns of these outputs in out [R, N]. packed: the matrix's arrays (body, codes, bases, starts,
    escapes). bias: [N], or [0] for none. words: not used."""
    body, codes, bases, starts, escapes = packed
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    blocks = (num_inputs + BLOCK - 1) // BLOCK
    folded = np.empty(LANES, np.float32)
    for panel in range(begin, end):
        at = int64(starts[panel])
        for row in range(0, num_rows, MOST_TILE_ROWS):  # the panel is in the caches when it is decoded again
            some = x[row : row + MOST_TILE_ROWS]
            num_some = some.shape[0]
            outputs = _OUTPUTS_OF[num_some]
            for first in range(0, PANEL_ROWS, outputs):
                if num_some == 1:
                    _one_row(some, num_some, num_inputs, body, codes, bases, panel, blocks, escapes, at, first, folded)
                elif num_some == 2:
                    _two_rows(some, num_some, num_inputs, body, codes, bases, panel, blocks, escapes, at, first, folded)
                elif num_some == 3:
                    _three_rows(some, num_some, num_inputs, body, codes, bases, panel, blocks, escapes, at, first, folded)
                elif num_some == 4:
                    _four_rows(some, num_some, num_inputs, body, codes, bases, panel, blocks, escapes, at, first, folded)
                elif num_some <= 6:
                    _up_to_six(some, num_some, num_inputs, body, codes, bases, panel, blocks, escapes, at, first, folded)
                else:
                    _up_to_eight(some, num_some, num_inputs, body, codes, bases, panel, blocks, escapes, at, first, folded)
                first_output = panel * PANEL_ROWS + first
                for r in range(num_some):
                    for n in range(min(outputs, num_outputs - first_output)):
                        total = folded[outputs * r + n]
                        if bias.shape[0] > 0:
                            total += widen(bias[first_output + n])
                        out[row + r, first_output + n] = narrow(total, out[0, 0])


@njit(**_HELPER)
def _unpacked_share(x: Any, packed: Any, bias: Any, words: Any, begin: int, end: int, out: Any) -> None:
    """Computes the same as _fused_share, but unpacks some outputs' weights to memory before it multiplies them. words: the rows as
    widened_stripe takes them; empty if the processor multiplies bfloat16."""
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
    """Returns the rows of x, widened to float32 in the form that widened_stripe takes."""
    words = np.empty(x.shape[0] * padded_inputs_of(x.shape[1]), np.float32)
    widen_rows(x, x, words)
    return words


_multiply, _words_of = (_multiply_pairs, _no_words) if HAS_BFLOAT16_PRODUCTS else (_multiply_widened, _widened)
_share = _fused_share if IS_FUSED else _unpacked_share
_PACKED = (uint8[::1], uint64[::1], uint8[::1], uint32[::1], uint8[::1])
PACKED_LINEAR = void(uint16[:, ::1], *_PACKED, uint16[::1], int64, uint16[:, ::1])
UNPACK_ROWS = void(*_PACKED, uint16[:, ::1])
GATHER_PACKED_ROWS = void(int64[::1], *_PACKED, float64, uint16[:, ::1])
PACK_ROWS = int64(uint16[:, ::1], *_PACKED)


def _packed_linear(
    x: Any,  # [R, K] bfloat16 bits; R is at most MOST_ROWS
    body: Any,  # [P * B * 256]
    codes: Any,  # [P * B * 12]
    bases: Any,  # [P * 4]
    starts: Any,  # [P]
    escapes: Any,  # [E + 64]
    bias: Any,  # [N], or [0] for none
    num_shares: int,  # number of shares that the outputs are cut into, one for each thread
    out: Any,  # [R, N]
) -> None:
    panels = starts.shape[0]
    words = _words_of(x)
    for share in prange(num_shares):
        begin, end = panels * share // num_shares, panels * (share + 1) // num_shares
        _share(x, (body, codes, bases, starts, escapes), bias, words, int64(begin), int64(end), out)


def _unpack_rows(
    body: Any,  # [P * B * 256], of consecutive panels
    codes: Any,  # [P * B * 12]
    bases: Any,  # [P * 4]
    starts: Any,  # [P]
    escapes: Any,  # [E + 64], of the whole matrix
    out: Any,  # [N, K] bfloat16 bits
) -> None:
    num_inputs = out.shape[1]
    blocks = (num_inputs + BLOCK - 1) // BLOCK
    for panel in prange(starts.shape[0]):
        last = np.empty(BLOCK, np.uint16)
        packed = (body, codes, bases, starts, escapes)
        _unpack_panel(packed, int64(panel), blocks, num_inputs, last, out, panel * PANEL_ROWS)


def _gather_packed_rows(
    ids: Any,  # [T]: indices of rows
    body: Any,  # [P * B * 256]
    codes: Any,  # [P * B * 12]
    bases: Any,  # [P * 4]
    starts: Any,  # [P]
    escapes: Any,  # [E + 64]
    scale: float,  # factor of the rows, applied in float32
    out: Any,  # [T, K] bfloat16 bits
) -> None:
    num_inputs, factor = out.shape[1], float32(scale)
    blocks = (num_inputs + BLOCK - 1) // BLOCK
    for token in prange(ids.shape[0]):
        last, rows = np.empty(BLOCK, np.uint16), np.empty((PANEL_ROWS, num_inputs), np.uint16)
        packed = (body, codes, bases, starts, escapes)
        panel = int64(ids[token]) // PANEL_ROWS
        _unpack_panel(packed, panel, blocks, num_inputs, last, rows, 0)
        found, to = rows[ids[token] - panel * PANEL_ROWS], out[token]
        for i in range(num_inputs):
            to[i] = narrow(widen(found[i]) * factor, found[i])


@njit(**_HELPER)
def _base_of(weights: Any, row: int, num_inputs: int, counts: Any) -> int:
    """Returns the base of a row: the lowest of those seven consecutive exponents that the largest number of its weights have.
    weights: [.., K]. counts: [4, 256] int32, work space."""
    counts[:] = 0
    for i in range(num_inputs):
        counts[i & 3, (weights[row, i] >> 7) & 255] += 1  # four counters each, so that equal neighbours do not wait for each other
    within = int32(0)
    for exponent in range(ESCAPE):
        within += counts[0, exponent] + counts[1, exponent] + counts[2, exponent] + counts[3, exponent]
    base, most = 0, within
    for first in range(1, MOST_BASE + 1):
        last = first + ESCAPE - 1
        within += counts[0, last] + counts[1, last] + counts[2, last] + counts[3, last]
        within -= counts[0, first - 1] + counts[1, first - 1] + counts[2, first - 1] + counts[3, first - 1]
        if within > most:
            base, most = first, within
    return base


@njit(**_OPTIONS)
def pack_rows(
    weights: Any,  # [N, K] bfloat16 bits
    body: Any,  # [P * B * 256]
    codes: Any,  # [P * B * 12]
    bases: Any,  # [P * 4]
    starts: Any,  # [P], counted from the first of these escapes
    escapes: Any,  # [N * K + 64]
) -> int:
    """Packs the weights of consecutive panels into the given arrays, and returns the number of their escapes. The equivalent
    without Numba is loader.formats.packed_rows.pack_rows."""
    num_rows, num_inputs = weights.shape
    blocks = (num_inputs + BLOCK - 1) // BLOCK
    counts, last = np.empty((4, 256), np.int32), np.empty(BLOCK, np.uint16)
    flat = weights.reshape(-1)
    at = int64(0)
    for panel in range(starts.shape[0]):
        starts[panel] = at
        for n in range(PANEL_ROWS):
            row = panel * PANEL_ROWS + n
            bases[row] = _base_of(weights, row, num_inputs, counts) if row < num_rows else 0
        for block in range(blocks):
            k = block * BLOCK
            some = min(BLOCK, num_inputs - k)
            for n in range(PANEL_ROWS):
                row = panel * PANEL_ROWS + n
                number = (panel * blocks + block) * PANEL_ROWS + n
                source, source_at = flat, row * num_inputs + k
                if row >= num_rows or some < BLOCK:
                    last[:] = uint16(bases[row]) << 7  # code 0, which takes no escape
                    if row < num_rows:
                        last[:some] = flat[source_at : source_at + some]
                    source, source_at = last, 0
                escaped = pack_block(source, source_at, bases[row], number, body, codes, escapes, at)
                if HAS_EXPANSION:
                    at += count_bits(escaped)
                else:
                    while escaped != 0:
                        escapes[at] = (source[source_at + _ORDER[lowest_bit(escaped)]] >> 7) & 255
                        at += 1
                        escaped &= escaped - 1
    return at


packed_linear_serial = njit(**_OPTIONS)(_packed_linear)
packed_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_packed_linear_parallel", _packed_linear))
unpack_rows_serial = njit(**_OPTIONS)(_unpack_rows)
unpack_rows_parallel = njit(**_OPTIONS, parallel=True)(named("_unpack_rows_parallel", _unpack_rows))
gather_packed_rows_serial = njit(**_OPTIONS)(_gather_packed_rows)
gather_packed_rows_parallel = njit(**_OPTIONS, parallel=True)(named("_gather_packed_rows_parallel", _gather_packed_rows))
