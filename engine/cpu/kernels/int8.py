"""Multiplies a few rows with int8 weights on the CPU, without widening the weights (AVX512-VNNI, vpdpbusd: four bytes at a time).

A row's unit is its largest magnitude divided by 32639. Each element of x is rounded to a whole number of units, and that number
becomes two digits, 256 * high + low, both int8. The sums of products of digits and weights are exact. The rounding to whole units
loses half a unit at most, less than a product's own rounding to bfloat16. The instruction needs one operand without sign, so 128 is
added to the weights, and 128 times the sum of a row's digits is subtracted at the end.

Shapes: R rows, K inputs (a multiple of 64, 65536 at most), N outputs (4 at least). Reference implementation:
reference.int8_linear."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int8, int32, njit, prange, types, void
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.bits import FASTMATH, bits_of_float, float_of_bits, magnitude, named, narrow, prefetch_line, widen
from engine.cpu.kernels.tiles import fold_sums
from engine.cpu.kernels.vectors import I64, LANES, PAIRS, vector
from engine.host import processor

STEP = 64  # int8 values in a vector
LARGEST = 127 * 256 + 127
MAX_INPUTS = 65536  # with more, sums of products up to 255 * 127 could overflow int32
_STRIPE = 32  # outputs a thread takes at a time
_TILE = 4 * 4 * LANES  # partial sums of the digits of two rows and four outputs
_PIECE_BYTES = 32 << 10  # all rows' digits that are used at a time
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
HAS_INT8_PRODUCTS = processor.runs("int8_linear")


def digit_tile(num_columns: int) -> Any:
    """Returns a function (digits, at, weight, weight_at, width, length, ahead, fetched, sums, sums_at) for kernels that multiplies
    num_columns rows of digits with four outputs' weights.

    It adds the products of `length` digits of each row, from index `at` on, with the weights plus 128, from weight_at on, to 16
    partial sums (int32) for each pair of row and output: those of row c and output n begin at sums_at + 16 * (4 c + n). width:
    elements from one row to the next, in both arrays. Meanwhile `fetched` (1 to 4) weight rows that lie `ahead` elements after
    these are prefetched."""

    @intrinsic
    def tile(
        typing_context: Any,
        digits: Any,
        at: Any,
        weight: Any,
        weight_at: Any,
        width: Any,
        length: Any,
        ahead: Any,
        fetched: Any,
        sums: Any,
        sums_at: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def data(position: int) -> Any:
                return context.make_array(signature.args[position])(context, builder, args[position]).data

            def load(base: Any, place: Any) -> Any:
                return builder.load(builder.bitcast(builder.gep(base, [place]), PAIRS.as_pointer()), align=1)

            def prefetch(place: Any) -> None:
                prefetch_line(builder, builder.gep(weights, [place]), 3)

            def add_products(total: Any, unsigned: Any, signed: Any) -> Any:
                kind = ir.FunctionType(PAIRS, [PAIRS] * 3)
                function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
                return builder.call(function, [total, unsigned, signed])

            columns, weights, totals_data = data(0), data(2), data(8)
            _, begin, _, weight_begin, row, count, ahead_by, num_fetched, _, sums_begin = args
            columns_at = [builder.add(begin, builder.mul(row, ir.Constant(I64, c))) for c in range(num_columns)]
            weights_at = [builder.add(weight_begin, builder.mul(row, ir.Constant(I64, n))) for n in range(4)]
            fetch_at = []
            for n in range(4):
                fetch_row = builder.udiv(builder.mul(num_fetched, ir.Constant(I64, n)), ir.Constant(I64, 4))
                fetch_at.append(builder.add(builder.add(weight_begin, ahead_by), builder.mul(fetch_row, row)))
            places, totals = [], []
            for number in range(4 * num_columns):
                address = builder.gep(totals_data, [builder.add(sums_begin, ir.Constant(I64, number * LANES))])
                places.append(builder.bitcast(address, PAIRS.as_pointer()))
                totals.append(cgutils.alloca_once(builder, PAIRS))
                builder.store(builder.load(places[-1], align=4), totals[-1])
            with cgutils.for_range_slice(builder, ir.Constant(I64, 0), count, ir.Constant(I64, STEP)) as (k, _):
                some = [builder.xor(load(weights, builder.add(place, k)), vector(PAIRS, 0x80808080)) for place in weights_at]
                for place in fetch_at:
                    prefetch(builder.add(place, k))
                for c, place in enumerate(columns_at):
                    column = load(columns, builder.add(place, k))
                    for n, of_output in enumerate(some):
                        total = totals[4 * c + n]
                        builder.store(add_products(builder.load(total), of_output, column), total)
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        sizes = (types.int64,)
        return types.void(digits, types.int64, weight, *sizes * 5, sums, types.int64), generate

    return tile


_one_row, _two_rows = digit_tile(2), digit_tile(4)


@njit(fastmath=FASTMATH, error_model="numpy")
def unit_of(row: Any) -> float:
    """Returns the unit of a row of elements [K], float32: its largest magnitude divided by LARGEST. The unit is NaN or infinity if
    an element of the row is."""
    largest = int32(0)
    for k in range(row.shape[0]):  # compared as bits, which sort as magnitudes do, NaN above all
        largest = max(largest, magnitude(bits_of_float(widen(row[k]))))
    return float_of_bits(largest) / float32(LARGEST)


@njit(fastmath=FASTMATH, error_model="numpy")
def split(row: Any, begin: int, end: int, unit: float, high: Any, low: Any) -> tuple[int, int]:
    """Rounds the elements from begin to below end of a row to whole numbers of `unit`, and splits each number into two int8 digits,
    256 * high + low. Writes the digits to high and low from index 0 on, and returns the sums of the high digits and of the low
    ones. With a unit of 0 all digits are 0."""
    inverse = float32(1.0) / unit if unit > float32(0.0) else float32(0.0)
    high_sum, low_sum = int32(0), int32(0)
    for k in range(begin, end):
        whole = int32(np.floor(widen(row[k]) * inverse + float32(0.5)))
        upper = int32((whole + int32(128)) >> int32(8))
        lower = int32(whole - int32(upper << int32(8)))
        high[k - begin], low[k - begin] = int8(upper), int8(lower)
        high_sum = int32(high_sum + upper)
        low_sum = int32(low_sum + lower)
    return high_sum, low_sum


@njit(fastmath=FASTMATH, error_model="numpy")
def _digits(x: Any, row: int, units: Any, digits: Any, offsets: Any) -> None:
    units[row] = unit_of(x[row])
    high_sum, low_sum = split(x[row], 0, x.shape[1], units[row], digits[2 * row], digits[2 * row + 1])
    offsets[2 * row], offsets[2 * row + 1] = int32(128) * high_sum, int32(128) * low_sum


@njit(fastmath=FASTMATH, error_model="numpy")
def _stripe(digits: Any, units: Any, offsets: Any, weight: Any, scale: Any, bias: Any, out: Any, begin: int, end: int) -> None:
    """Computes the outputs from begin to below end for all rows into out [R, N]. digits: [2 R, K] int8, each row's high digits and
    then its low ones. units [R]: the rows' units. offsets [2 R] int32: 128 times the sum of each row of digits. weight, scale,
    bias: as for _int8_linear."""
    num_rows, (num_outputs, num_inputs) = out.shape[0], weight.shape
    row_tiles = (num_rows + 1) // 2
    fetched = (3 + row_tiles) // row_tiles
    num_pieces = max(1, (2 * num_rows * num_inputs + _PIECE_BYTES - 1) // _PIECE_BYTES)
    piece = ((num_inputs + num_pieces - 1) // num_pieces + STEP - 1) // STEP * STEP
    panels = (end - begin + 3) // 4
    sums = np.zeros(panels * row_tiles * _TILE, np.int32)
    folded = np.empty(LANES, np.int32)
    for k in range(0, num_inputs, piece):
        length = min(piece, num_inputs - k)
        for panel in range(panels):
            at = min(begin + 4 * panel, num_outputs - 4) * num_inputs + k  # the last four outputs may overlap those before
            if panel + 1 < panels or k + piece >= num_inputs:  # fetch the next four outputs' weights
                next_at = at + 4 * num_inputs - (k if panel + 1 == panels else 0)
            else:  # or this stripe's next piece of the inputs
                next_at = begin * num_inputs + k + piece
            for tile in range(row_tiles):
                ahead = next_at - at + min(tile * fetched, 3) * num_inputs
                sums_at = (panel * row_tiles + tile) * _TILE
                digits_at = 4 * tile * num_inputs + k
                if 2 * tile + 1 < num_rows:
                    _two_rows(digits, digits_at, weight, at, num_inputs, length, ahead, fetched, sums, sums_at)
                else:
                    _one_row(digits, digits_at, weight, at, num_inputs, length, ahead, fetched, sums, sums_at)
    for panel in range(panels):
        first = min(begin + 4 * panel, num_outputs - 4)
        for tile in range(row_tiles):
            fold_sums(sums, (panel * row_tiles + tile) * _TILE, folded)
            for r in range(2 * tile, min(2 * tile + 2, num_rows)):
                for n in range(4):
                    high = folded[8 * (r - 2 * tile) + n] - offsets[2 * r]
                    low = folded[8 * (r - 2 * tile) + 4 + n] - offsets[2 * r + 1]
                    total = (float32(high) * float32(256.0) + float32(low)) * units[r] * scale[first + n]
                    if bias.shape[0] > 0:
                        total += widen(bias[first + n])
                    out[r, first + n] = narrow(total, out[0, 0])


def int8_linear_signature(element: types.Type) -> Any:
    return void(element[:, ::1], int8[:, ::1], float32[::1], element[::1], int8[:, ::1], element[:, ::1])


def _int8_linear(
    x: Any,  # [R, K]
    weight: Any,  # [N, K] int8
    scale: Any,  # [N] float32: the scale of each output's weights
    bias: Any,  # [N], or [0] for none
    digits: Any,  # [2 R, K] int8: scratch
    out: Any,  # [R, N]
) -> None:
    num_rows, num_outputs = x.shape[0], weight.shape[0]
    units, offsets = np.empty(num_rows, np.float32), np.empty(2 * num_rows, np.int32)
    for row in range(num_rows):
        _digits(x, row, units, digits, offsets)
    for stripe in prange((num_outputs + _STRIPE - 1) // _STRIPE):
        begin = stripe * _STRIPE
        _stripe(digits, units, offsets, weight, scale, bias, out, begin, min(begin + _STRIPE, num_outputs))


int8_linear_serial = njit(**_OPTIONS)(_int8_linear)
int8_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_int8_linear_parallel", _int8_linear))
