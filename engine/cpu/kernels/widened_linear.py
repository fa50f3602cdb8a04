"""Computes products with bfloat16 or int8 weights on processors that cannot multiply formats shorter than float32: weights are
widened to float32 when they are used.

Up to FEW_ROWS rows, or with fewer than PANEL outputs, weights are read as they lie in memory, and each tile widens them in
registers, because with so few rows memory is the limit. For more rows, a panel of weights is widened and transposed (packed) once
and then multiplied with all rows. Inputs are widened once, before the products. All data but the weights comes from the caches, and
weights that are needed next are prefetched.

Shapes: R rows, K inputs, N outputs (OUTPUTS at least). Reference implementations: torch's linear, reference.int8_linear."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, njit, prange, types, void

from engine.cpu.kernels.bits import FASTMATH, named, widen
from engine.cpu.kernels.lanes import load, load_factors, load_terms, store
from engine.cpu.kernels.vectors import LANES
from engine.cpu.kernels.widened_tiles import (
    OUTPUTS,
    PACKED_BEHIND,
    PACKED_ROWS,
    PANEL,
    ROWS,
    STEP,
    TILE_FLOATS,
    WIDTH,
    add_packed,
    add_products,
    fold_tile,
    lay_out_step,
    pack_step,
    packed_step,
    widen_step,
    widen_weight,
)

FEW_ROWS = 28
WIDENED_STRIPE = 8 * OUTPUTS  # outputs whose weights stay in the second-level cache until all rows have used them
STRIPE_FLOATS = WIDENED_STRIPE // OUTPUTS * TILE_FLOATS  # work space for one of them
_PIECE = 1024  # inputs of a tile's rows that stay in the first-level cache
# _PACKED_PIECE: inputs that are packed at a time. _PANELS: panels that are multiplied with them one after the other, while that
# piece of all rows' inputs stays in the second-level cache (256 rows of 2048 inputs all at once take a sixth longer).
_PACKED_PIECE, _PANELS = 512, 4
_LINE_FLOATS = 16  # float32 in a cache line; each part of the scratch begins at a line
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}
# The least rows that a tile of add_packed has: tiles are of about the same size, so none of more than FEW_ROWS rows is smaller.
_LEAST_PACKED = min(num_rows // -(-num_rows // PACKED_ROWS) for num_rows in range(FEW_ROWS + 1, FEW_ROWS + 2 * PACKED_ROWS))
_products = [add_products(num_rows) for num_rows in range(1, 7)]
_one, _two, _three, _four, _five, _six = (_products[min(number, ROWS) - 1] for number in range(1, 7))
_packed = [add_packed(max(_LEAST_PACKED, PACKED_ROWS - less)) for less in range(4)]
_all, _one_less, _two_less, _three_less = _packed
assert len(_packed) > PACKED_ROWS - _LEAST_PACKED
_INT8_STEP, _BFLOAT16_STEP = packed_step(True), packed_step(False)


def _padded(count: int, to: int) -> int:
    return (count + to - 1) // to * to


def padded_inputs(num_inputs: int) -> int:
    """Returns how many float32 a widened row of num_inputs inputs takes, for products without packing: num_inputs, rounded up to a
    multiple of STEP."""
    return (num_inputs + STEP - 1) // STEP * STEP


padded_inputs_of = njit(**_HELPER)(padded_inputs)


def scratch_floats(num_rows: int, num_inputs: int, num_shares: int) -> int:
    """Returns how many float32 of scratch a product of num_rows rows with num_inputs inputs needs: the widened inputs, and the work
    space of each of num_shares shares."""
    return _padded(num_rows * padded_inputs(num_inputs), _LINE_FLOATS) + num_shares * _own(num_rows)


def _own(num_rows: int) -> int:
    if num_rows <= FEW_ROWS:
        return STRIPE_FLOATS
    return (_PACKED_PIECE + _PANELS * num_rows) * PANEL


_own_floats = njit(**_HELPER)(_own)


@njit(**_HELPER)
def _tile_rows(tile: int, num_tiles: int, num_rows: int) -> tuple[int, int]:
    """Returns the first row and the number of rows of tile number `tile`, if num_rows rows are divided into num_tiles tiles as
    evenly as possible."""
    rows, more = num_rows // num_tiles, num_rows % num_tiles
    return tile * rows + min(tile, more), rows + (1 if tile < more else 0)


@njit(**_HELPER)
def widened_tiles(num_rows: int) -> int:
    """Returns the number of tiles, of at most ROWS rows each, into which num_rows rows are divided for products without packing."""
    return (num_rows + ROWS - 1) // ROWS


@njit(**_HELPER)
def _widen_tile(x: Any, weight: Any, first: int, num_rows: int, columns: Any) -> None:
    """Widens rows first to first + num_rows of x [R, K] into `columns` (float32) in the order that add_products needs: [steps,
    num_rows, STEP], padded with zeros after a row's last input. weight: read for its element type alone, which decides the order
    within a step."""
    num_inputs = x.shape[1]
    at = first * padded_inputs_of(num_inputs)
    whole = num_inputs // STEP * STEP
    for k in range(0, whole, STEP):
        for r in range(first, first + num_rows):
            widen_step(x, r * num_inputs + k, columns, at, weight)
            at += STEP
    if whole < num_inputs:
        last = np.zeros(STEP, x.dtype)
        for r in range(first, first + num_rows):
            for k in range(whole, num_inputs):
                last[k - whole] = x[r, k]
            widen_step(last, 0, columns, at, weight)
            at += STEP


@njit(**_HELPER)
def widen_rows(x: Any, weight: Any, columns: Any) -> None:
    """Widens all rows of x [R, K] into `columns` (float32), tile by tile, as widened_stripe needs them. weight: read for its
    element type alone, which decides the order."""
    num_rows = x.shape[0]
    num_tiles = widened_tiles(num_rows)
    for tile in range(num_tiles):
        first, rows = _tile_rows(tile, num_tiles, num_rows)
        _widen_tile(x, weight, first, rows, columns)


@njit(**_HELPER)
def _add(
    rows: int,
    x: Any,
    x_at: int,
    weight: Any,
    at: int,
    width: int,
    steps: int,
    ahead: int,
    fetched: int,
    fresh: int,
    sums: Any,
    to: int,
) -> None:
    if rows == 1:
        _one(x, x_at, weight, at, width, steps, ahead, fetched, fresh, sums, to)
    elif rows == 2:
        _two(x, x_at, weight, at, width, steps, ahead, fetched, fresh, sums, to)
    elif rows == 3 or ROWS == 3:
        _three(x, x_at, weight, at, width, steps, ahead, fetched, fresh, sums, to)
    elif rows == 4:
        _four(x, x_at, weight, at, width, steps, ahead, fetched, fresh, sums, to)
    elif rows == 5:
        _five(x, x_at, weight, at, width, steps, ahead, fetched, fresh, sums, to)
    else:
        _six(x, x_at, weight, at, width, steps, ahead, fetched, fresh, sums, to)


@njit(**_HELPER)
def _write(sums: Any, at: int, n: int, count: int, scale: Any, bias: Any, out: Any, row: int) -> None:
    scaled = load(sums, at, count) * load_factors(scale, n, count)
    store(out, row * out.shape[1] + n, count, scaled + load_terms(bias, n, count))


@njit(**_HELPER)
def _write_row(sums: Any, at: int, begin: int, end: int, scale: Any, bias: Any, out: Any, row: int) -> None:
    """Writes outputs begin to below end of row `row` to out [R, N], from their sums, which begin at index `at`: times scale, plus
    bias. scale, bias: [N], or [0] for none."""
    whole = begin + (end - begin) // LANES * LANES
    for n in range(begin, whole, LANES):
        _write(sums, at + n - begin, n, LANES, scale, bias, out, row)
    if whole < end:
        _write(sums, at + whole - begin, whole, end - whole, scale, bias, out, row)


@njit(**_HELPER)
def widened_stripe(
    columns: Any, num_tiles: int, weight: Any, scale: Any, bias: Any, sums: Any, out: Any, begin: int, end: int
) -> None:
    """Multiplies all rows of x with the weights of outputs begin to below end in float32, without packing the weights, into out [R,
    N]. columns: the inputs x [R, K], in num_tiles tiles, as widen_rows writes them. weight [N, K]: bfloat16 bits, or int8. scale
    [N]: the scale of each output's int8 weights; [0]: none. bias: [N], or [0] for none. sums: STRIPE_FLOATS float32 of work
    space."""
    num_rows, (num_outputs, num_inputs) = out.shape[0], weight.shape
    whole = num_inputs // STEP * STEP
    panels = (end - begin + OUTPUTS - 1) // OUTPUTS
    base = min(begin, num_outputs - OUTPUTS)  # the last panel of all may overlap the one before
    fetched = (OUTPUTS - 1 + num_tiles) // num_tiles  # weight rows needed next that each tile prefetches
    # prefetch the following outputs, or, if several tiles use these, the following stripe
    next_at = (OUTPUTS if num_tiles == 1 else WIDENED_STRIPE) * num_inputs
    last = np.zeros((OUTPUTS, STEP), weight.dtype)
    results = np.empty((ROWS, WIDENED_STRIPE + OUTPUTS), np.float32)
    for tile in range(num_tiles):
        first, rows = _tile_rows(tile, num_tiles, num_rows)
        at = first * padded_inputs_of(num_inputs)
        ahead = next_at + min(tile * fetched, OUTPUTS - 1) * num_inputs
        for k in range(0, whole, _PIECE):
            steps = min(_PIECE, whole - k) // STEP
            for panel in range(panels):
                weight_at = min(begin + OUTPUTS * panel, num_outputs - OUTPUTS) * num_inputs + k
                fresh = 1 if k == 0 else 0
                _add(rows, columns, at, weight, weight_at, num_inputs, steps, ahead, fetched, fresh, sums, panel * TILE_FLOATS)
            at += steps * STEP * rows
        for panel in range(panels):
            output = min(begin + OUTPUTS * panel, num_outputs - OUTPUTS)
            if whole < num_inputs:
                for n in range(OUTPUTS):
                    for k in range(whole, num_inputs):
                        last[n, k - whole] = weight[output + n, k]
                _add(rows, columns, at, last, 0, STEP, 1, 0, 1, 1 if whole == 0 else 0, sums, panel * TILE_FLOATS)
            fold_tile(sums, panel * TILE_FLOATS, rows, results, output - base, results.shape[1])
        for r in range(rows):
            _write_row(results, r * results.shape[1] + begin - base, begin, end, scale, bias, out, first + r)


@njit(**_HELPER)
def _lay_out(x: Any, first: int, num_rows: int, columns: Any) -> None:
    """Widens rows first to first + num_rows of x [R, K], which are one tile for add_packed, to float32 and transposes them. Writes
    the tile [K, num_rows] to its place in `columns`."""
    num_inputs = x.shape[1]
    at = first * num_inputs
    whole = max(0, num_inputs - PACKED_BEHIND) // STEP * STEP  # what a step writes behind its own stays within the tile
    for k in range(0, whole, STEP):
        lay_out_step(x, at + k, num_rows, columns, at + k * num_rows)
    for k in range(whole, num_inputs):
        for r in range(num_rows):
            columns[at + k * num_rows + r] = widen(x[first + r, k])


@njit(**_HELPER)
def _pack(weight: Any, output: int, first: int, count: int, packed: Any) -> None:
    """Widens and transposes `count` inputs, from input `first` on, of the weights of PANEL outputs, from `output` on, into packed
    [count, PANEL] float32."""
    width = weight.shape[1]
    step = _INT8_STEP if weight.itemsize == 1 else _BFLOAT16_STEP
    whole = count // step * step
    for n in range(0, PANEL, WIDTH):
        at = (output + n) * width + first
        for k in range(0, whole, step):
            pack_step(weight, at + k, width, packed, k * PANEL + n)
    for k in range(whole, count):
        for n in range(PANEL):
            packed[k * PANEL + n] = widen_weight(weight[output + n, first + k])


@njit(**_HELPER)
def _add_packed(
    rows: int, x: Any, x_at: int, packed: Any, count: int, fresh: int, sums: Any, to: int, weight: Any, at: int, fetched: int
) -> None:
    width = weight.shape[1]
    if rows == PACKED_ROWS:
        _all(x, x_at, packed, count, fresh, sums, to, weight, at, width, fetched)
    elif rows == PACKED_ROWS - 1:
        _one_less(x, x_at, packed, count, fresh, sums, to, weight, at, width, fetched)
    elif rows == PACKED_ROWS - 2:
        _two_less(x, x_at, packed, count, fresh, sums, to, weight, at, width, fetched)
    else:
        _three_less(x, x_at, packed, count, fresh, sums, to, weight, at, width, fetched)


@njit(**_HELPER)
def _panels(columns: Any, num_tiles: int, weight: Any, scale: Any, bias: Any, own: Any, out: Any, begin: int, end: int) -> None:
    """Computes outputs begin to below end, at most _PANELS panels, of all rows into out [R, N], with packed weights. Inputs are
    multiplied piece by piece. columns: the inputs, in num_tiles tiles, as _lay_out writes them. own: the share's work space, for
    packed weights and sums."""
    num_rows, (num_outputs, num_inputs) = out.shape[0], weight.shape
    packed, sums = own, own[_PACKED_PIECE * PANEL :]
    for k in range(0, num_inputs, _PACKED_PIECE):
        count = min(_PACKED_PIECE, num_inputs - k)
        for panel in range(begin, end, PANEL):
            output = min(panel, num_outputs - PANEL)  # the last panel may overlap the one before
            sums_at = (panel - begin) * num_rows
            next_panel, next_k = panel + PANEL, k
            if next_panel >= end:  # next is the first panel's next piece, or the panels after these
                next_k = k + count if k + count < num_inputs else 0
                next_panel = begin if next_k else end
            next_at = min(next_panel, num_outputs - PANEL) * num_inputs + next_k
            _pack(weight, output, k, count, packed)
            for tile in range(num_tiles):
                first, rows = _tile_rows(tile, num_tiles, num_rows)
                soon, fetched = _tile_rows(tile, num_tiles, PANEL)
                x_at, fetch_at = first * num_inputs + k * rows, next_at + soon * num_inputs
                fresh, to = 1 if k == 0 else 0, sums_at + first * PANEL
                _add_packed(rows, columns, x_at, packed, count, fresh, sums, to, weight, fetch_at, fetched)
    for row in range(num_rows):
        for panel in range(begin, end, PANEL):
            at = (panel - begin) * num_rows + row * PANEL + panel - min(panel, num_outputs - PANEL)
            _write_row(sums, at, panel, min(panel + PANEL, end), scale, bias, out, row)


@njit(**_HELPER)
def _share(
    words: Any, num_tiles: int, packs: bool, weight: Any, scale: Any, bias: Any, share: int, num_shares: int, out: Any
) -> None:
    """Computes x @ weight transposed, times scale and plus bias, for all rows and one share (`share` of num_shares) of the outputs,
    into out [R, N]. words: the widened inputs, in num_tiles tiles, then each share's work space (see scratch_floats). packs:
    whether weights are packed; the order of the inputs in words depends on it."""
    num_rows, num_outputs = out.shape
    at_once = _PANELS * PANEL if packs else WIDENED_STRIPE
    own_floats = _own_floats(num_rows)
    own = words[words.shape[0] - own_floats * (num_shares - share) :][:own_floats]
    stripes = (num_outputs + at_once - 1) // at_once
    for stripe in range(stripes * share // num_shares, stripes * (share + 1) // num_shares):
        begin, end = stripe * at_once, min((stripe + 1) * at_once, num_outputs)
        if packs:
            _panels(words, num_tiles, weight, scale, bias, own, out, begin, end)
        else:
            widened_stripe(words, num_tiles, weight, scale, bias, own, out, begin, end)


def widened_linear_signature(element: types.Type, weight: types.Type) -> Any:
    return void(element[:, ::1], weight[:, ::1], float32[::1], element[::1], float32[::1], int64, element[:, ::1])


def _widened_linear(
    x: Any,  # [R, K] bfloat16 bits
    weight: Any,  # [N, K] bfloat16 bits, or int8
    scale: Any,  # [N]: the scale of each output's weights, or [0] for none
    bias: Any,  # [N], or [0] for none
    words: Any,  # [scratch_floats]
    num_shares: int,  # number of shares that the outputs are cut into, one for each thread
    out: Any,  # [R, N]
) -> None:
    num_rows, num_outputs = out.shape
    packs = num_rows > FEW_ROWS and num_outputs >= PANEL
    num_tiles = (num_rows + PACKED_ROWS - 1) // PACKED_ROWS if packs else widened_tiles(num_rows)
    if packs:
        for tile in prange(num_tiles):
            _lay_out(x, *_tile_rows(int64(tile), num_tiles, num_rows), words)
    else:
        widen_rows(x, weight, words)
    for share in prange(num_shares):
        _share(words, num_tiles, packs, weight, scale, bias, int64(share), num_shares, out)


widened_linear_serial = njit(**_OPTIONS)(_widened_linear)
widened_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_widened_linear_parallel", _widened_linear))
