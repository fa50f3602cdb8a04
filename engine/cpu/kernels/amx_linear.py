"""Computes products with bfloat16 or int8 weights on the CPU's matrix unit (AMX).

First all threads together interleave the inputs into tiles of 16 columns (amx_tiles.py). Then each thread computes panels of 32
outputs: it multiplies a piece of a panel's weights at a time, while the next piece is prefetched. With up to four tiles of columns,
the weights are used as they lie in memory. With more, each piece is packed (copied) while the one before is multiplied; it stays in
the second-level cache for all columns, together with the matching piece of the columns and the sums of some panels. Scratch memory
begins at a cache line, because a tile whose rows each lie in two lines takes nearly twice as long.

Int8 weights that are not packed are multiplied with two digits of x (see int8.py), each of which is a column. That takes as many
products as bfloat16 weights, but half the bytes. From 33 rows on, the digits make more than four tiles of columns. The weights are
then packed as bfloat16, which is exact, and multiplied with x itself. This takes one conversion for all rows, instead of digits of
all inputs and twice the sums (128 and 256 rows of the models mid and one-b of the benchmarks: 1.1 to 1.2 times as fast as bfloat16
weights; digits were 0.75 to 0.98 times as fast).

Shapes: R rows, K inputs (a multiple of 32; of 64 for int8), N outputs (32 at least), S steps of 64 bytes of K, C tiles of 16
columns. Reference implementations: torch's linear, reference.int8_linear."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int8, int32, int64, njit, prange, types, void

from engine.cpu.kernels.amx import configure_tiles, release_tiles, tile_configuration
from engine.cpu.kernels.amx_tiles import (
    PACKED_WORDS,
    PANEL,
    PIECE_STEPS,
    STEP_BYTES,
    TILE,
    TILE_WORDS,
    interleave,
    pack_rows,
    tile_products,
    write_tile,
)
from engine.cpu.kernels.bits import FASTMATH, named, widen
from engine.cpu.kernels.int8 import split, unit_of

_CONFIGURATION = tile_configuration()
# A stripe is the panels whose sums are kept while pieces of their weights are multiplied with the same piece of the columns. The
# more panels, the less often columns come from beyond the second-level cache. _LEAST_STRIPE: the fewest panels of a stripe.
# _SUMS_WORDS: the most words that the sums of a larger stripe may take.
_LEAST_STRIPE, _SUMS_WORDS = 4, 64 << 10
_COLUMN_STEPS = 1024  # steps in a piece of all columns together: a megabyte at most
_UNPACKED_COLUMNS = 4  # with more tiles of columns, weights are packed
_APART = 16  # with at least so many tiles of inputs, all threads interleave them
_PAIR_WORDS = 4 * TILE_WORDS  # sums of a panel and two columns
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_one_column, _two_columns = tile_products(1, False), tile_products(2, False)
_write_sums, _write_digits = write_tile(False), write_tile(True)
_one_packed_column, _two_packed_columns = tile_products(1, True), tile_products(2, True)


def _columns(tiles: int, of_int8: bool) -> tuple[int, bool]:
    """Returns (number of tiles of 16 columns, whether weights are packed) for `tiles` tiles of 16 rows of x. Each tile of rows
    becomes one tile of columns, or two with int8 weights that are not packed: one for each digit."""
    columns = 2 * tiles if of_int8 else tiles
    packs = columns > _UNPACKED_COLUMNS
    return (tiles, True) if packs else (columns, False)


_columns_of = njit(_columns)


def scratch_words(num_rows: int, num_inputs: int, of_int8: bool, num_shares: int) -> int:
    """Returns how many 32-bit words of scratch a product of num_rows rows with num_inputs inputs needs: room for all columns, and
    for each of num_shares shares its sums and, if weights are packed, two packed panels. of_int8: the weights are int8, else
    bfloat16."""
    tiles = (num_rows + TILE - 1) // TILE
    columns, packs = _columns(tiles, of_int8)
    panel_sums = (columns + 1) // 2 * _PAIR_WORDS
    stripe = max(_LEAST_STRIPE, min(2 * columns, _SUMS_WORDS // panel_sums))
    packed = 2 * PACKED_WORDS if packs else 0
    return tiles * TILE * num_inputs // 2 + num_shares * (packed + stripe * panel_sums)


@njit(fastmath=FASTMATH, error_model="numpy")
def _factors(scale: Any, bias: Any, at: int, factors: Any) -> None:
    """Fills factors [64] with the scales of the 32 outputs of a panel, from output `at` on, followed by their biases. scale: [N],
    or [0]: all scales are 1. bias: [N], or [0]: all biases are 0."""
    for n in range(PANEL):
        factors[n] = scale[at + n] if scale.shape[0] > 0 else float32(1.0)
        factors[PANEL + n] = widen(bias[at + n]) if bias.shape[0] > 0 else float32(0.0)


@njit(fastmath=FASTMATH, error_model="numpy")
def _write(
    weight: Any, sums: Any, sums_at: int, units: Any, factors: Any, at: int, column: int, num_columns: int, digits: int, out: Any
) -> None:
    """Writes the finished sums of a panel's 32 outputs, from output `at` on, to out [R, N]. The sums begin at index sums_at of sums
    and belong to num_columns tiles of columns (1 or 2), from tile `column` on.

    digits: 2 if the two tiles of columns hold the high and the low digits of the same 16 rows of x, which are then combined and
    multiplied by the rows' units (see int8.py); else 1. factors: as _factors fills it."""
    num_rows, num_outputs = out.shape
    for half in range(2):
        for tile in range(num_columns // digits):
            row = TILE * (column // digits + tile)
            place = sums_at + (half * num_columns + tile) * TILE_WORDS
            out_at = row * num_outputs + at + TILE * half
            count = min(TILE, num_rows - row)
            if digits == 2:
                _write_digits(weight, sums, place, units, row, factors, TILE * half, count, out, out_at, num_outputs)
            else:
                _write_sums(weight, sums, place, units, row, factors, TILE * half, count, out, out_at, num_outputs)


@njit(fastmath=FASTMATH, error_model="numpy")
def _outputs_of(share: int, num_shares: int, num_outputs: int) -> tuple[int, int]:
    """Returns the first output that a share (of num_shares) computes, and the output after its last. Shares are whole panels of 32
    outputs; only the last panel may be smaller."""
    panels = (num_outputs + PANEL - 1) // PANEL
    return PANEL * (panels * share // num_shares), min(PANEL * (panels * (share + 1) // num_shares), num_outputs)


@njit(fastmath=FASTMATH, error_model="numpy")
def _share(
    words: Any, columns: int, packs: bool, units: Any, weight: Any, scale: Any, bias: Any, share: int, num_shares: int, out: Any
) -> None:
    """Computes x [R, K] @ weight [N, K] transposed, times scale [N] and plus bias [N], for all rows and one share (`share` of
    num_shares) of the outputs, into out [R, N]. The weights are bfloat16 or int8.

    words: the inputs x as columns [C, S, 16, 16], then each share's work space (see scratch_words). columns, packs: the results of
    _columns. units [rows]: the units of digits, for int8 weights (see int8.py)."""
    begin, end = _outputs_of(share, num_shares, out.shape[1])
    num_outputs, width = weight.shape
    packed_at = 0
    digits = 2 if weight.itemsize == 1 and not packs else 1
    step = STEP_BYTES // 2 * digits
    steps = width // step
    at_once = max(1, min(PIECE_STEPS, _COLUMN_STEPS // columns))
    num_pieces = (steps + at_once - 1) // at_once
    piece = (steps + num_pieces - 1) // num_pieces
    pairs = (columns + 1) // 2
    factors = np.empty(2 * PANEL, np.float32)
    own_words = (words.shape[0] - columns * steps * TILE_WORDS) // num_shares
    own = words[words.shape[0] - own_words * (num_shares - share) :][:own_words]
    packed, sums = own, own[2 * PACKED_WORDS if packs else 0 :]
    stripe_outputs = PANEL * (sums.shape[0] // (pairs * _PAIR_WORDS))
    configure_tiles(_CONFIGURATION)
    if packs and begin < end:
        pack_rows(weight, min(begin, num_outputs - PANEL) * width, width, TILE * width, piece, packed, packed_at)
    for stripe in range(begin, end, stripe_outputs):
        stripe_end = min(stripe + stripe_outputs, end)
        for first in range(0, steps, piece):
            count = min(piece, steps - first)
            for panel in range(stripe, stripe_end, PANEL):
                next_panel, next_first = panel + PANEL, first
                if next_panel >= stripe_end:  # next is this stripe's next piece, or the next stripe
                    next_first = first + piece if first + piece < steps else 0
                    next_panel = stripe if next_first else stripe_end
                next_count = min(piece, steps - next_first) if next_panel < end else 0
                # the last panel may overlap the one before
                output, next_output = min(panel, num_outputs - PANEL), min(next_panel, num_outputs - PANEL)
                _factors(scale, bias, output, factors)
                for column in range(0, columns, 2):
                    num_columns, pair = min(2, columns - column), column // 2
                    sums_at = ((panel - stripe) // PANEL * pairs + pair) * _PAIR_WORDS if num_pieces > 1 else 0
                    of_columns = (words, (column * steps + first) * TILE_WORDS, steps * TILE_WORDS, count)
                    to = (first == 0, sums, sums_at)
                    rows = (PANEL * pair // pairs, PANEL * (pair + 1) // pairs) if next_count else (0, 0)
                    soon = (weight, next_output * width + next_first * step, width, TILE * width, next_count, *rows)
                    if packs:
                        if num_columns == 2:
                            _two_packed_columns(packed, packed_at, *of_columns, *to, *soon, PACKED_WORDS - packed_at)
                        else:
                            _one_packed_column(packed, packed_at, *of_columns, *to, *soon, PACKED_WORDS - packed_at)
                    elif num_columns == 2:
                        _two_columns(weight, output * width + first * step, *of_columns, *to, *soon, 0)
                    else:
                        _one_column(weight, output * width + first * step, *of_columns, *to, *soon, 0)
                    if first + count == steps:
                        _write(weight, sums, sums_at, units, factors, output, column, num_columns, digits, out)
                packed_at = PACKED_WORDS - packed_at
    release_tiles()


@njit(fastmath=FASTMATH, error_model="numpy")
def _pack(inputs: Any, tile: int, step: int, words: Any) -> None:
    """Interleaves step number `step` (64 bytes of K) of the 16 rows of tile number `tile` into its place in words [C, S, 16, 16].
    inputs: [R, words in a row], x with four bytes a word."""
    num_rows, width = inputs.shape
    begin, count = TILE * (tile * width + step), min(TILE, num_rows - TILE * tile)
    interleave(inputs, begin, width, count, words, (tile * (width // TILE) + step) * TILE_WORDS)


@njit(fastmath=FASTMATH, error_model="numpy")
def _split_and_pack(x: Any, units: Any, tile: int, step: int, words: Any) -> None:
    """Splits 64 elements, from number 64 step on, of each of the 16 rows of x [R, K] in tile number `tile` into two int8 digits,
    and interleaves the digits in words: the high digits in column 2 tile, the low ones in the next column. units [R]: the rows'
    units (see int8.py)."""
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
    return void(int32[:, ::1], element[:, ::1], element[::1], int32[::1], int64, element[:, ::1])


def _amx_linear(
    inputs: Any,  # [R, K / 2] int32: x, two elements a word
    weight: Any,  # [N, K] bfloat16 bits
    bias: Any,  # [N], or [0] for none
    words: Any,  # [scratch_words]
    num_shares: int,  # number of shares that the outputs are cut into, one for each thread
    out: Any,  # [R, N]
) -> None:
    num_rows = out.shape[0]
    tiles, steps = (num_rows + TILE - 1) // TILE, inputs.shape[1] // TILE
    none = np.empty(0, np.float32)
    if tiles * steps >= _APART:
        for place in prange(tiles * steps):
            _pack(inputs, place // steps, place % steps, words)
    else:
        for place in range(tiles * steps):
            _pack(inputs, place // steps, place % steps, words)
    for share in prange(num_shares):
        _share(words, *_columns_of(tiles, False), none, weight, none, bias, share, num_shares, out)


def amx_int8_linear_signature(element: types.Type) -> Any:
    return void(element[:, ::1], int8[:, ::1], float32[::1], element[::1], int32[::1], int64, element[:, ::1])


def _amx_int8_linear(
    x: Any,  # [R, K]
    weight: Any,  # [N, K] int8
    scale: Any,  # [N]: the scale of each output's weights
    bias: Any,  # [N], or [0] for none
    words: Any,  # [scratch_words]
    num_shares: int,  # number of shares that the outputs are cut into, one for each thread
    out: Any,  # [R, N]
) -> None:
    num_rows = out.shape[0]
    tiles = (num_rows + TILE - 1) // TILE
    columns, packs = _columns_of(tiles, True)
    inputs, width = x.view(np.int32), x.shape[1]
    units = np.zeros(tiles * TILE, np.float32)  # 0 also for missing rows: memory could hold tiny numbers, slow to multiply
    if packs:
        steps = width * 2 // STEP_BYTES
        for place in prange(tiles * steps):
            _pack(inputs, place // steps, place % steps, words)
    else:
        steps = width // STEP_BYTES
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
    for share in prange(num_shares):
        _share(words, columns, packs, units, weight, scale, bias, share, num_shares, out)


amx_linear_serial = njit(**_OPTIONS)(_amx_linear)
amx_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_amx_linear_parallel", _amx_linear))
amx_int8_linear_serial = njit(**_OPTIONS)(_amx_int8_linear)
amx_int8_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_amx_int8_linear_parallel", _amx_int8_linear))
