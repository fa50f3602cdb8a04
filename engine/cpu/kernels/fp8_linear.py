"""Computes products with FP8 weights on the CPU (Numba). One kernel multiplies a few rows; another widens the weights for products
of many rows. Both also take int8 weights with one scale for each output, for experts (grouped_linear.py).

Weights are read once, four outputs at a time, and converted in registers (fp8_codes.py), to bfloat16 if the processor multiplies
bfloat16, else to float32. The products of inputs that share a scale are added up, then multiplied with the scale. As in linear.py,
the weights that are needed next are prefetched, and inputs are multiplied in pieces that stay in the first-level cache.

Shapes: R rows, K inputs, N outputs (4 at least), G groups of inputs that share a scale. Reference implementations:
reference.fp8_linear, reference.fp8_rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, njit, prange, types, uint8, void
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.bits import FASTMATH, HAS_BFLOAT16_PRODUCTS, named, narrow, widen
from engine.cpu.kernels.fp8_codes import code_factor, code_loader, widen_codes
from engine.cpu.kernels.tiles import fold_sums
from engine.cpu.kernels.vectors import I32, I64, LANES, SUMS, Loader, add_products, fma, for_pieces, splat, vector

FP8_STRIPE = 32  # outputs a thread takes at a time
_OUTPUTS = 4
_TILE = 4 * _OUTPUTS * LANES  # partial sums of 4 rows and 4 outputs
_PIECE_BYTES = 32 << 10  # all rows' inputs that are used at a time
_PIECE = 128  # a piece is a multiple of this, so that no group is divided
_LINE = 64  # codes in a cache line
# Where weights are prefetched to: with half as many bytes for each product as bfloat16 has, more lines must be under way than the
# first-level cache can wait for (one row: 1.8 times as fast as bfloat16 weights, not 1.5).
_SECOND_CACHE = 2
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}


def fp8_tile(num_rows: int) -> Any:
    """Returns a function (x, x_at, weight, weight_at, width, length, ahead, fetched, scales, scales_at, num_groups, group, sums,
    sums_at) for kernels that multiplies num_rows rows of x with four outputs' weights.

    For row r and output n it multiplies `length` elements of x from x_at + r * width on with those of weight from weight_at + n *
    width on, and adds the products to the 16 partial sums at sums_at + 16 * (4 r + n). Each `group` elements have a scale, with
    which their products are multiplied; the scales of output n begin at scales_at + n * num_groups. The sums are code_factor times
    too small. Meanwhile `fetched` (1 to 4) weight rows that lie `ahead` elements after these are prefetched."""

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        x_at: Any,
        weight: Any,
        weight_at: Any,
        width: Any,
        length: Any,
        ahead: Any,
        fetched: Any,
        scales: Any,
        scales_at: Any,
        num_groups: Any,
        group: Any,
        sums: Any,
        sums_at: Any,
    ) -> Any:
        paired = HAS_BFLOAT16_PRODUCTS and x.dtype != types.float32

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def data(position: int) -> Any:
                return context.make_array(signature.args[position])(context, builder, args[position]).data

            load_x, load_weight = Loader(builder, data(0), x.dtype, paired), code_loader(builder, data(2), weight, paired)
            factors, totals_data = data(8), data(12)
            _, x_begin, _, begin, row, count, ahead_by, num_fetched, _, factors_begin, per_output, in_group, _, sums_begin = args
            rows_at = [builder.add(x_begin, builder.mul(row, I64(r))) for r in range(num_rows)]
            weights_at = [builder.add(begin, builder.mul(row, I64(n))) for n in range(_OUTPUTS)]
            factors_at = [builder.add(factors_begin, builder.mul(per_output, I64(n))) for n in range(_OUTPUTS)]
            fetch_at = []
            for n in range(_OUTPUTS):
                fetch_row = builder.udiv(builder.mul(num_fetched, I64(n)), I64(_OUTPUTS))
                fetch_at.append(builder.add(builder.add(begin, ahead_by), builder.mul(fetch_row, row)))
            places, totals, parts = [], [], []
            for number in range(num_rows * _OUTPUTS):
                place = builder.gep(totals_data, [builder.add(sums_begin, I64(number * LANES))])
                places.append(builder.bitcast(place, SUMS.as_pointer()))
                totals.append(cgutils.alloca_once(builder, SUMS))
                parts.append(cgutils.alloca_once(builder, SUMS))
                builder.store(builder.load(places[-1], align=4), totals[-1])

            def add(k: Any, some: Any = None) -> None:
                if some is None:
                    for at in fetch_at:
                        load_weight.prefetch(builder.add(at, k), _SECOND_CACHE)
                for first in range(0, _LINE, load_x.step):
                    at_k = builder.add(k, I64(first))
                    left = None if some is None else builder.sub(some, I32(first))
                    columns = [load_weight(builder.add(at, at_k), left) for at in weights_at]
                    for r, row_at in enumerate(rows_at):
                        own = load_x(builder.add(row_at, at_k), left)
                        for n, column in enumerate(columns):
                            part = parts[r * _OUTPUTS + n]
                            builder.store(add_products(builder, builder.load(part), own, column, paired), part)

            with cgutils.for_range_slice(builder, I64(0), count, in_group) as (first, _):
                for part in parts:
                    builder.store(vector(SUMS, 0.0), part)
                left = builder.sub(count, first)
                inside = builder.select(builder.icmp_signed("<", left, in_group), left, in_group)
                for_pieces(builder, inside, _LINE, lambda k, some=None: add(builder.add(first, k), some))
                number = builder.udiv(first, in_group)
                for n, at in enumerate(factors_at):
                    factor = splat(builder, builder.load(builder.gep(factors, [builder.add(at, number)])), SUMS)
                    for r in range(num_rows):
                        total = totals[r * _OUTPUTS + n]
                        part = builder.load(parts[r * _OUTPUTS + n])
                        builder.store(fma(builder, part, factor, builder.load(total)), total)
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        one = types.int64
        return types.void(x, one, weight, *(one,) * 5, scales, *(one,) * 3, sums, one), generate

    return tile


_one_row, _two_rows, _three_rows, _four_rows = (fp8_tile(num_rows) for num_rows in (1, 2, 3, 4))


def fp8_linear_signature(element: types.Type) -> Any:
    return void(element[:, ::1], uint8[:, ::1], float32[:, ::1], int64, element[::1], element[:, ::1])


@njit(**_HELPER)
def _add_tile(
    x: Any,
    x_at: int,
    num_rows: int,
    weight: Any,
    at: int,
    length: int,
    ahead: int,
    fetched: int,
    scales: Any,
    scales_at: int,
    group: int,
    sums: Any,
    to: int,
) -> None:
    width, groups = weight.shape[1], scales.shape[1]
    factors = scales.reshape(-1)
    if num_rows >= 4:
        _four_rows(x, x_at, weight, at, width, length, ahead, fetched, factors, scales_at, groups, group, sums, to)
    elif num_rows == 3:
        _three_rows(x, x_at, weight, at, width, length, ahead, fetched, factors, scales_at, groups, group, sums, to)
    elif num_rows == 2:
        _two_rows(x, x_at, weight, at, width, length, ahead, fetched, factors, scales_at, groups, group, sums, to)
    else:
        _one_row(x, x_at, weight, at, width, length, ahead, fetched, factors, scales_at, groups, group, sums, to)


@njit(**_HELPER)
def _write_outputs(folded: Any, factor: float, num_rows: int, row: int, first: int, bias: Any, out: Any) -> None:
    """Writes folded [4 rows, 4 outputs] times factor, plus bias, to out [R, N] from row `row` and output `first` on, but only rows
    below num_rows. bias: [N], or [0] for none."""
    for r in range(min(4, num_rows - row)):
        for n in range(_OUTPUTS):
            total = folded[4 * r + n] * factor
            if bias.shape[0] > 0:
                total += widen(bias[first + n])
            out[row + r, first + n] = narrow(total, out[0, 0])


@njit(**_HELPER)
def fp8_stripe(x: Any, weight: Any, scales: Any, group: int, bias: Any, out: Any, begin: int, end: int) -> None:
    """Computes the outputs from begin to below end of all rows x [R, K] into out [R, N]. weight: [N, K], FP8 codes or int8. scales:
    [N, G]. group: how many inputs share a scale: a multiple of 128, or all inputs. bias: [N], or [0] for none."""
    num_rows, num_inputs = x.shape
    num_outputs, num_groups = scales.shape
    row_tiles = (num_rows + 3) // 4
    fetched = (3 + row_tiles) // row_tiles  # each row tile prefetches its share of the next four outputs' weights
    num_pieces = max(1, (num_rows * num_inputs * x.itemsize + _PIECE_BYTES - 1) // _PIECE_BYTES)
    piece = ((num_inputs + num_pieces - 1) // num_pieces + _PIECE - 1) // _PIECE * _PIECE
    if num_groups > 1:
        piece = (piece + group - 1) // group * group
    panels = (end - begin + 3) // 4
    sums = np.zeros(panels * row_tiles * _TILE, np.float32)
    folded = np.empty(LANES, np.float32)
    for k in range(0, num_inputs, piece):
        length = min(piece, num_inputs - k)
        for panel in range(panels):
            output = min(begin + 4 * panel, num_outputs - 4)  # the last four outputs may overlap those before
            at, scales_at = output * num_inputs + k, output * num_groups + k // group
            if panel + 1 < panels or k + piece >= num_inputs:  # prefetch the next four outputs' weights
                next_at = at + 4 * num_inputs - (k if panel + 1 == panels else 0)
            else:  # or this stripe's next piece of the inputs
                next_at = begin * num_inputs + k + piece
            for tile in range(row_tiles):
                ahead = next_at - at + min(tile * fetched, 3) * num_inputs
                x_at, rows, to = 4 * tile * num_inputs + k, num_rows - 4 * tile, (panel * row_tiles + tile) * _TILE
                _add_tile(x, x_at, rows, weight, at, length, ahead, fetched, scales, scales_at, group, sums, to)
    for panel in range(panels):
        for tile in range(row_tiles):
            fold_sums(sums, (panel * row_tiles + tile) * _TILE, folded)
            _write_outputs(folded, code_factor(weight), num_rows, 4 * tile, min(begin + 4 * panel, num_outputs - 4), bias, out)


def _fp8_linear(
    x: Any,  # [R, K]
    weight: Any,  # [N, K] codes
    scales: Any,  # [N, G]
    group: int,  # inputs that share a scale: a multiple of 128, or K
    bias: Any,  # [N], or [0] for none
    out: Any,  # [R, N]
) -> None:
    num_outputs = weight.shape[0]
    for stripe in prange((num_outputs + FP8_STRIPE - 1) // FP8_STRIPE):
        begin = stripe * FP8_STRIPE
        fp8_stripe(x, weight, scales, group, bias, out, begin, min(begin + FP8_STRIPE, num_outputs))


def fp8_rows_signature(element: types.Type, code: types.Type = uint8) -> Any:
    return void(code[:, ::1], float32[:, ::1], int64, element[:, ::1])


def _fp8_rows(
    weight: Any,  # [N, K] codes
    scales: Any,  # [N, G]
    group: int,  # inputs that share a scale
    out: Any,  # [N, K]: the weights
) -> None:
    num_outputs, num_inputs = weight.shape
    for output in prange(num_outputs):
        at = output * num_inputs
        for number in range(scales.shape[1]):
            k = number * group
            widen_codes(weight, at + k, min(group, num_inputs - k), scales[output, number], out, at + k)


fp8_linear_serial = njit(**_OPTIONS)(_fp8_linear)
fp8_linear_parallel = njit(**_OPTIONS, parallel=True)(named("_fp8_linear_parallel", _fp8_linear))
fp8_rows_serial = njit(**_OPTIONS)(_fp8_rows)
fp8_rows_parallel = njit(**_OPTIONS, parallel=True)(named("_fp8_rows_parallel", _fp8_rows))
