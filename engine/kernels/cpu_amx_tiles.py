"""Products with a weight matrix by the processor's matrix unit (AMX), weights read as they lie.

A tile instruction multiplies 16 rows of 64 bytes as they lie in memory with 16 columns that lie interleaved, four bytes of a column
at a time. Taken as rows, weights [N, K] need no other order; it is the inputs, far fewer, that are interleaved, and what comes out
is the product transposed, 16 outputs times 16 columns at a time.

A step is 64 bytes of a row of weights and of 16 columns; a word is four bytes. bfloat16: columns are rows of x. int8: columns are
digits of rows of x (engine/kernels/cpu_int8.py). engine/kernels/cpu_amx_linear.py is what uses all this.

Where many columns meet the same weights, these are copied first. In memory a row begins at any multiple of eight bytes, so that a
row of a tile lies in two lines of the cache, and rows are often whole pages apart, which makes their lines push each other out.
"""

from __future__ import annotations

from collections.abc import Callable
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
# Steps of a row that are multiplied before the next panel's; packed, rows are a line further apart, or the first-level cache would
# keep 12 of them (its lines at equal places of a page share one set).
PIECE_STEPS = 64
PACKED_ROW_BYTES = (PIECE_STEPS + 1) * STEP_BYTES
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


def tile_products(num_columns: int, packs: bool) -> Any:
    """A function (own, at, row_bytes, words, words_at, apart, steps, fresh, sums, sums_at, weight, next_at, width, next_steps,
    from_row, to_row, packed_at).

    `steps` steps of 32 outputs, whose weights lie from element `at` of own on in rows of row_bytes, times num_columns (1 or 2)
    tiles of columns, the first at words_at and the next `apart` words behind, are added to sums [2, num_columns, 16, 16] at sums_at
    (float32, or int32 of int8 weights); fresh: to nothing.

    Meanwhile what is needed next is fetched: of the 32 rows of weight that begin at element next_at and are `width` apart, rows
    from_row to below to_row, next_steps steps of each. packs: own is packed, and they are packed too, to packed_at; else own is
    weight, and they come into the second-level cache: row by row for one tile of columns, which the processor's own fetching can
    follow, all rows side by side for two (measured: 8 rows of mid 1.2 times as fast, of one-b the same; 32 of one-b 0.9 times).
    """

    @intrinsic
    def products(
        typing_context: Any,
        own: Any,
        at: Any,
        row_bytes: Any,
        words: Any,
        words_at: Any,
        apart: Any,
        steps: Any,
        fresh: Any,
        sums: Any,
        sums_at: Any,
        weight: Any,
        next_at: Any,
        width: Any,
        next_steps: Any,
        from_row: Any,
        to_row: Any,
        packed_at: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            next_begin, row, next_count, first, end, to = args[11:]
            source = _address(context, builder, signature, args, 10, next_begin)
            stride = builder.mul(row, _constant(_size(weight)))
            by_rows = packs or num_columns == 1
            if by_rows:
                target = _address(context, builder, signature, args, 0, to) if packs else None
                rows = _Rows(builder, source, stride, target, next_count, first, end)
                share = builder.sdiv(builder.add(rows.num_lines, builder.sub(args[6], _constant(1))), args[6])

            def fetch(k: Any) -> None:
                if by_rows:
                    rows.fetch(share)
                    return
                with cgutils.for_range_slice(builder, first, end, _constant(1)) as (n, _):
                    _prefetch(builder, builder.gep(source, [builder.add(k, builder.mul(stride, n))]))

            _multiply(context, builder, signature, args, num_columns, weight.dtype == types.int8, fetch)
            return context.get_dummy_value()

        sizes = (types.int64,)
        before = (own, *sizes * 2, words, *sizes * 3, types.boolean, sums, types.int64)
        return types.void(*before, weight, *sizes * 6), generate

    return products


@intrinsic
def pack_rows(typing_context: Any, weight: Any, at: Any, width: Any, steps: Any, packed: Any, packed_at: Any) -> Any:
    """Packs `steps` steps of 32 rows of weights that begin at element `at` and are `width` apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, begin, row, count, _, to = args
        source, target = (_address(context, builder, signature, args, n, at) for n, at in ((0, begin), (4, to)))
        stride = builder.mul(row, _constant(_size(weight)))
        rows = _Rows(builder, source, stride, target, count, _constant(0), _constant(PANEL))
        rows.fetch(rows.num_lines)
        return context.get_dummy_value()

    sizes = (types.int64,)
    return types.void(weight, *sizes * 3, packed, types.int64), generate


def _size(array: Any) -> int:
    return int(array.dtype.bitwidth) // 8


class _Rows:
    """Rows of weights that are fetched, num_lines of 64 bytes in all. target: where they are packed, PACKED_ROW_BYTES apart; None:
    they come into the cache."""

    def __init__(
        self, builder: ir.IRBuilder, source: Any, stride: Any, target: Any, steps: Any, from_row: Any, to_row: Any
    ) -> None:
        self._builder, self._row_bytes = builder, builder.mul(steps, _constant(STEP_BYTES))
        self.num_lines = builder.mul(steps, builder.sub(to_row, from_row))
        self._left = cgutils.alloca_once_value(builder, self.num_lines)
        self._column = cgutils.alloca_once_value(builder, _constant(0))
        self._ends = [(source, stride)] + ([] if target is None else [(target, _constant(PACKED_ROW_BYTES))])
        begins = (builder.gep(at, [builder.mul(apart, from_row)]) for at, apart in self._ends)
        self._rows = [cgutils.alloca_once_value(builder, begin) for begin in begins]

    def fetch(self, num_lines: Any) -> None:
        """The next so many lines, if there are."""
        builder = self._builder
        left = builder.load(self._left)
        some = builder.select(builder.icmp_signed("<", num_lines, left), num_lines, left)
        builder.store(builder.sub(left, some), self._left)
        with cgutils.for_range_slice(builder, _constant(0), some, _constant(1)):
            column = builder.load(self._column)
            source, *target = (builder.gep(builder.load(row), [column]) for row in self._rows)
            if target:
                _store(builder, _load(builder, source, PAIRS), target[0])
            else:
                _prefetch(builder, source)
            column = builder.add(column, _constant(STEP_BYTES))
            is_over = builder.icmp_signed("==", column, self._row_bytes)
            builder.store(builder.select(is_over, _constant(0), column), self._column)
            for row, (_, apart) in zip(self._rows, self._ends, strict=True):
                place = builder.load(row)
                builder.store(builder.select(is_over, builder.gep(place, [apart]), place), row)


def _prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Into the second-level cache, where a panel has room."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [address, *(ir.Constant(I32, value) for value in (0, 2, 1))])


def _multiply(
    context: Any,
    builder: ir.IRBuilder,
    signature: Any,
    args: Any,
    num_columns: int,
    of_int8: bool,
    meanwhile: Callable[[Any], None],
) -> None:
    """What tile_products does with its first ten arguments; meanwhile: what else is done in every step, which
    begins k bytes into a row."""
    _, begin, stride, _, words_begin, columns_apart, count, anew, _, sums_begin = args[:10]
    weights = _address(context, builder, signature, args, 0, begin)
    columns = _address(context, builder, signature, args, 3, words_begin)
    column_bytes = builder.mul(columns_apart, _constant(WORD_BYTES))
    to = _address(context, builder, signature, args, 8, sums_begin)
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
        meanwhile(k)
        for half in range(2):
            for column in range(num_columns):
                multiply = "tdpbssd" if of_int8 else "tdpbf16ps"
                _call(builder, multiply, _tile(half * num_columns + column), _tile(4 + half), _tile(6 + column))
    for tile, place in totals:
        _call(builder, "tilestored64", tile, place, _constant(STEP_BYTES))


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
