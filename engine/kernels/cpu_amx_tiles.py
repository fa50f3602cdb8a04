"""Products with a weight matrix by the processor's matrix unit (AMX), weights read as they lie.

A tile instruction multiplies 16 rows of 64 bytes as they lie in memory with 16 columns that lie interleaved, four bytes of a column
at a time. Taken as rows, weights [N, K] need no other order; it is the inputs, far fewer, that are interleaved, and what comes out
is the product transposed, 16 outputs times 16 columns at a time.

A step is 64 bytes of a row of weights and of 16 columns; a word is four bytes. bfloat16: columns are rows of x. int8: columns are
digits of rows of x (engine/kernels/cpu_int8.py). engine/kernels/cpu_amx_linear.py is what uses all this.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.cpu_amx import TILE_ROW_BYTES, TILE_ROWS
from engine.kernels.cpu_vectors import HALF_BFLOATS, I32, I64, LANES, PAIRS, SUMS, fma, shuffle, vector

TILE, STEP_BYTES = TILE_ROWS, TILE_ROW_BYTES  # rows of a tile, and words of its columns; bytes of a row
TILE_WORDS, WORD_BYTES = TILE * TILE, 4
TILE_BYTES = TILE * STEP_BYTES
PANEL = 2 * TILE  # outputs that are computed together
HAS_INT8_TILES = bool(llvmlite.binding.get_host_cpu_features().get("amx-int8"))

I8 = ir.IntType(8)
_BYTES = I8.as_pointer()


def _call(builder: ir.IRBuilder, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _tile(number: int) -> Any:
    return ir.Constant(I8, number)


def _constant(value: int) -> Any:
    return ir.Constant(I64, value)


def _address(context: Any, builder: ir.IRBuilder, signature: Any, args: Any, position: int, index: Any) -> Any:
    """Of an element of the array that is argument `position`."""
    array = context.make_array(signature.args[position])(context, builder, args[position])
    return builder.bitcast(builder.gep(array.data, [index]), _BYTES)


def _load(builder: ir.IRBuilder, address: Any, kind: ir.VectorType) -> Any:
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=4)


def _store(builder: ir.IRBuilder, value: Any, address: Any) -> None:
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=2)


def _prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Into the second-level cache, where a panel has room."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [address, *(ir.Constant(I32, value) for value in (0, 2, 1))])


def tile_products(num_columns: int) -> Any:
    """A function (weight, at, width, words, words_at, apart, steps, fresh, ahead, fetch_from, fetch_to, sums, sums_at).

    `steps` steps of 32 outputs, whose weights lie from element `at` on in rows of `width`, times num_columns (1 or 2) tiles of
    columns, the first at words_at and the next `apart` words behind, are added to sums [2, num_columns, 16, 16] at sums_at
    (float32, or int32 of int8 weights); fresh: to nothing. Meanwhile weights that are needed next are fetched: at each step those
    of rows fetch_from to below fetch_to, `ahead` elements behind.
    """

    @intrinsic
    def products(
        typing_context: Any,
        weight: Any,
        at: Any,
        width: Any,
        words: Any,
        words_at: Any,
        apart: Any,
        steps: Any,
        fresh: Any,
        ahead: Any,
        fetch_from: Any,
        fetch_to: Any,
        sums: Any,
        sums_at: Any,
    ) -> Any:
        size = 1 if weight.dtype == types.int8 else 2
        multiply = "tdpbssd" if weight.dtype == types.int8 else "tdpbf16ps"

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, begin, row, _, words_begin, columns_apart, count, anew, ahead_by, from_row, to_row, _, sums_begin = args
            stride = builder.mul(row, _constant(size))
            weights = _address(context, builder, signature, args, 0, begin)
            fetched = builder.gep(weights, [builder.mul(ahead_by, _constant(size))])
            columns = _address(context, builder, signature, args, 3, words_begin)
            column_bytes = builder.mul(columns_apart, _constant(WORD_BYTES))
            to = _address(context, builder, signature, args, 11, sums_begin)
            totals = [(_tile(number), builder.gep(to, [_constant(number * TILE_BYTES)])) for number in range(2 * num_columns)]
            with builder.if_else(anew) as (then, otherwise):
                with then:
                    for tile, _ in totals:
                        _call(builder, "tilezero", tile)
                with otherwise:
                    for tile, place in totals:
                        _call(builder, "tileloadd64", tile, place, _constant(STEP_BYTES))
            end = builder.mul(count, _constant(STEP_BYTES))
            with cgutils.for_range_slice(builder, _constant(0), end, _constant(STEP_BYTES)) as (k, _):
                for half in range(2):
                    place = builder.add(k, builder.mul(stride, _constant(half * TILE)))
                    _call(builder, "tileloadd64", _tile(4 + half), builder.gep(weights, [place]), stride)
                for column in range(num_columns):
                    place = builder.add(builder.mul(k, _constant(TILE)), builder.mul(column_bytes, _constant(column)))
                    _call(builder, "tileloadd64", _tile(6 + column), builder.gep(columns, [place]), _constant(STEP_BYTES))
                with cgutils.for_range_slice(builder, from_row, to_row, _constant(1)) as (n, _):
                    _prefetch(builder, builder.gep(fetched, [builder.add(k, builder.mul(stride, n))]))
                for half in range(2):
                    for column in range(num_columns):
                        _call(builder, multiply, _tile(half * num_columns + column), _tile(4 + half), _tile(6 + column))
            for tile, place in totals:
                _call(builder, "tilestored64", tile, place, _constant(STEP_BYTES))
            return context.get_dummy_value()

        sizes = (types.int64,)
        return types.void(weight, *sizes * 2, words, *sizes * 3, types.boolean, *sizes * 3, sums, types.int64), generate

    return products


def _transposed(builder: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 words: each turn exchanges one bit of a word's row with the same bit of its lane."""
    for bit in (8, 4, 2, 1):
        low = [LANES + lane - bit if lane & bit else lane for lane in range(LANES)]
        high = [LANES + lane if lane & bit else lane + bit for lane in range(LANES)]
        turned = list(rows)
        for row in range(LANES):
            if not row & bit:
                turned[row] = shuffle(builder, rows[row], rows[row + bit], low)
                turned[row + bit] = shuffle(builder, rows[row], rows[row + bit], high)
        rows = turned
    return rows


@intrinsic
def interleave(typing_context: Any, words: Any, at: Any, stride: Any, num_rows: Any, out: Any, out_at: Any) -> Any:
    """The 16 words from `at` on of each of num_rows (1 to 16) rows, `stride` words apart, to a tile of columns at out_at: first the
    first words of all 16 rows, and so on. Rows that are not there are like the last that is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, begin, step, count, _, out_begin = args
        last = builder.sub(count, _constant(1))
        rows = []
        for number in range(LANES):
            row = builder.select(builder.icmp_signed("<", _constant(number), count), _constant(number), last)
            rows.append(
                _load(builder, _address(context, builder, signature, args, 0, builder.add(begin, builder.mul(row, step))), PAIRS)
            )
        to = _address(context, builder, signature, args, 4, out_begin)
        for number, column in enumerate(_transposed(builder, rows)):
            _store(builder, column, builder.gep(to, [_constant(number * STEP_BYTES)]))
        return context.get_dummy_value()

    sizes = (types.int64,)
    return types.void(words, *sizes * 3, out, types.int64), generate


@intrinsic
def write_tile(
    typing_context: Any,
    weight: Any,
    sums: Any,
    at: Any,
    units: Any,
    unit_at: Any,
    factors: Any,
    factors_at: Any,
    num_rows: Any,
    out: Any,
    out_at: Any,
    width: Any,
) -> Any:
    """Sums [16 outputs, 16 columns] at `at` to 16 outputs of num_rows (1 to 16) rows of out (bfloat16), `width` apart, from out_at.

    factors[factors_at + 32 + output] is added. Of int8 weights the 16 times 16 sums behind are of the low digits; high and low ones
    together are multiplied by units[unit_at + row] and factors[factors_at + output] before."""
    of_digits = weight.dtype == types.int8

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def load(position: int, index: Any, kind: Any = SUMS) -> Any:
            return _load(builder, _address(context, builder, signature, args, position, index), kind)

        _, _, begin, _, unit_begin, _, factors_begin, count, _, out_begin, row_width = args
        rows = []
        for output in range(LANES):
            place = builder.add(begin, _constant(output * LANES))
            if of_digits:
                high, low = (
                    builder.sitofp(load(1, each, PAIRS), SUMS) for each in (place, builder.add(place, _constant(TILE_WORDS)))
                )
                rows.append(fma(builder, high, vector(SUMS, 256.0), low))
            else:
                rows.append(load(1, place))
        if of_digits:
            unit = load(3, unit_begin)
            rows = [builder.fmul(row, unit) for row in rows]
        added = load(5, builder.add(factors_begin, _constant(PANEL)))
        for number, row in enumerate(_transposed(builder, rows)):
            with builder.if_then(builder.icmp_signed("<", _constant(number), count)):
                if of_digits:
                    row = builder.fmul(row, load(5, factors_begin))
                narrow = builder.fptrunc(builder.fadd(row, added), HALF_BFLOATS)
                place = builder.add(out_begin, builder.mul(row_width, _constant(number)))
                _store(builder, narrow, _address(context, builder, signature, args, 8, place))
        return context.get_dummy_value()

    places = (types.int64,)
    arrays = (weight, sums, *places, units, *places, factors, *places * 2, out, *places * 2)
    return types.void(*arrays), generate
