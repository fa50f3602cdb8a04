"""Computes products with a weight matrix by the processor's matrix unit (AMX), which reads the weights in place, without
rearranging them.

A tile instruction multiplies 16 rows of 64 consecutive bytes with 16 columns that are interleaved, four bytes of a column at a
time. Rows of weights [N, K] already have that form, so only the inputs, which are far fewer, are interleaved. The result is the
product transposed, 16 outputs times 16 columns at a time.

In this file a step is 64 bytes of each of 16 rows of weights and the matching part of 16 columns, that is, the operands of one
instruction. A word is four bytes. A panel is 32 outputs, two tiles of weights. With bfloat16 weights, a column is a row of x. With
int8 weights, each row of x becomes two columns of int8 digits: its elements as whole numbers 256 * high + low (int8.py). The
kernels in amx_linear.py are made of these functions.

If many columns are multiplied with the same weights, the weights are copied (packed) first. Without packing, a row of a tile often
lies in two cache lines, because rows begin at any multiple of eight bytes; and rows are often whole pages apart, so that their
lines displace each other in the cache. Packed int8 weights become bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.amx import TILE_ROW_BYTES, TILE_ROWS
from engine.cpu.kernels.bits import prefetch_line
from engine.cpu.kernels.vectors import BFLOATS, HALF_BFLOATS, I64, LANES, PAIRS, SUMS, fma, shuffle, vector

TILE, STEP_BYTES = TILE_ROWS, TILE_ROW_BYTES  # rows of a tile, also words of a column; bytes of a row
TILE_WORDS, WORD_BYTES = TILE * TILE, 4
TILE_BYTES = TILE * STEP_BYTES
PANEL = 2 * TILE  # outputs that are computed together
PIECE_STEPS = 64  # steps of a row that are multiplied before the next panel's
PACKED_WORDS = PANEL * PIECE_STEPS * STEP_BYTES // WORD_BYTES  # words of a panel's piece
# How far after the place that is being packed each row is prefetched. The processor prefetches by itself, but less so for about a
# millisecond after half a millisecond in the interpreter. Then a panel takes 24 us instead of 15, and 17 with this (128 rows of
# 2048 inputs on 2 cores of a Xeon).
_PACKED_AHEAD_BYTES = 4 * STEP_BYTES

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
    """Returns a pointer to element `index` of an array, as a pointer to bytes. The array is argument number `position` of an
    intrinsic."""
    array = context.make_array(signature.args[position])(context, builder, args[position])
    return builder.bitcast(builder.gep(array.data, [index]), _BYTES)


def _load(builder: ir.IRBuilder, address: Any, kind: ir.VectorType) -> Any:
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=1 if kind.element == I8 else 4)


def _store(builder: ir.IRBuilder, value: Any, address: Any) -> None:
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=2)


def tile_products(num_columns: int, packs: bool) -> Any:
    """Returns a function (own, at, words, words_at, columns_apart, steps, fresh, sums, sums_at, weight, next_at, width,
    halves_apart, next_steps, from_row, to_row, packed_at) for kernels. It multiplies a panel of weights (32 outputs) with
    num_columns (1 or 2) tiles of 16 columns.

    The function multiplies `steps` steps of the panel, whose weights begin at element `at` of own, with the tiles of columns. The
    first tile begins at words[words_at], the second columns_apart words after it. The products are added to sums [2, num_columns,
    16, 16] at sums_at (float32, or int32 for int8 weights that are not packed); if fresh, the sums start from 0. A panel's rows of
    weights are `width` elements apart, and its second 16 rows begin halves_apart elements after its first 16.

    The function also prefetches weights that are needed next: next_steps steps of rows from_row to below to_row of the panel that
    begins at element next_at of weight. If packs, own holds packed weights (step by step, two whole tiles each), and the next
    weights are also packed, to own from packed_at on. Otherwise own is weight, and the next weights are brought into the
    second-level cache.

    All rows are prefetched side by side. The processor's own prefetching within each row then works, and a load that waits for
    memory delays few others (128 rows of the model one-b: 1.3 times as fast as row after row). Only with one tile of columns and
    without packing, rows are prefetched one after the other (8 rows of the model mid: 1.2 times as fast)."""

    @intrinsic
    def products(
        typing_context: Any,
        own: Any,
        at: Any,
        words: Any,
        words_at: Any,
        columns_apart: Any,
        steps: Any,
        fresh: Any,
        sums: Any,
        sums_at: Any,
        weight: Any,
        next_at: Any,
        width: Any,
        halves_apart: Any,
        next_steps: Any,
        from_row: Any,
        to_row: Any,
        packed_at: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            steps, (next_begin, row, apart, next_count, first, end, to) = args[5], args[10:]
            source = _address(context, builder, signature, args, 9, next_begin)
            rows = _Rows(builder, source, _bytes_of(builder, weight, row), _bytes_of(builder, weight, apart), weight.dtype)
            own_rows = None if packs else rows
            if packs:
                target = _address(context, builder, signature, args, 0, to)

                def fetch(k: Any) -> None:
                    rows.pack(k, target, first, builder.select(builder.icmp_signed("<", k, next_bytes), end, first))

                next_bytes = builder.mul(next_count, _constant(STEP_BYTES))
            elif num_columns == 1:
                in_turn = _InTurn(rows, next_count, first, end)
                share = builder.sdiv(builder.add(in_turn.num_lines, builder.sub(steps, _constant(1))), steps)

                def fetch(k: Any) -> None:
                    in_turn.fetch(share)
            else:

                def fetch(k: Any) -> None:
                    rows.each(first, end, lambda n, place: prefetch_line(builder, builder.gep(place, [k])))

            _multiply(context, builder, signature, args, num_columns, weight.dtype == types.int8 and not packs, own_rows, fetch)
            if packs:  # the steps that are left, if there are more of them than were multiplied
                begin = builder.mul(steps, _constant(STEP_BYTES))
                with cgutils.for_range_slice(builder, begin, next_bytes, _constant(STEP_BYTES)) as (k, _):
                    rows.pack(k, target, first, end)
            return context.get_dummy_value()

        sizes = (types.int64,)
        before = (own, *sizes, words, *sizes * 3, types.boolean, sums, *sizes)
        return types.void(*before, weight, *sizes * 7), generate

    return products


@intrinsic
def pack_rows(
    typing_context: Any, weight: Any, at: Any, width: Any, halves_apart: Any, steps: Any, packed: Any, packed_at: Any
) -> Any:
    """Copies `steps` steps of the panel of weights that begins at element `at` of weight to packed, from packed_at on, in the order
    that tile_products reads if it packs: step by step, 32 rows of 64 bytes each. int8 becomes bfloat16. width: elements from one
    row to the next. halves_apart: elements from the first row to the 17th."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, begin, row, apart, count, _, to = args
        source, target = (_address(context, builder, signature, args, n, at) for n, at in ((0, begin), (5, to)))
        rows = _Rows(builder, source, _bytes_of(builder, weight, row), _bytes_of(builder, weight, apart), weight.dtype)
        end = builder.mul(count, _constant(STEP_BYTES))
        with cgutils.for_range_slice(builder, _constant(0), end, _constant(STEP_BYTES)) as (k, _):
            rows.pack(k, target, _constant(0), _constant(PANEL))
        return context.get_dummy_value()

    sizes = (types.int64,)
    return types.void(weight, *sizes * 4, packed, types.int64), generate


def _bytes_of(builder: ir.IRBuilder, array: Any, num_elements: Any) -> Any:
    return builder.mul(num_elements, _constant(int(array.dtype.bitwidth) // 8))


def _as_bfloats(builder: ir.IRBuilder, place: Any) -> Any:
    """Returns the 32 int8 at the address `place` as a vector of bfloat16, which is exact."""
    wide = builder.sitofp(_load(builder, place, ir.VectorType(I8, 2 * LANES)), ir.VectorType(ir.FloatType(), 2 * LANES))
    return builder.fptrunc(wide, BFLOATS)


class _Rows:
    """The place in memory of the 32 rows of weights of a panel, in a kernel that is being generated. begin: address of row 0.
    stride: bytes from one row to the next, among the first 16 rows and among the others. halves_apart: bytes from row 0 to row 16.
    element: the weights' type."""

    def __init__(self, builder: ir.IRBuilder, begin: Any, stride: Any, halves_apart: Any, element: types.Type) -> None:
        self.builder, self.begin, self.stride = builder, begin, stride
        self._of_int8 = element == types.int8
        self.jump = builder.sub(halves_apart, builder.mul(stride, _constant(TILE)))  # added after the first 16 rows

    def place(self, row: Any) -> Any:
        builder = self.builder
        jump = builder.select(builder.icmp_signed("<", row, _constant(TILE)), _constant(0), self.jump)
        return builder.gep(self.begin, [builder.add(builder.mul(row, self.stride), jump)])

    def each(self, first: Any, end: Any, visit: Callable[[Any, Any], None]) -> None:
        """Emits a loop over rows `first` to below `end`, whose body is visit(row, the row's address)."""
        with cgutils.for_range_slice(self.builder, first, end, _constant(1)) as (row, _):
            visit(row, self.place(row))

    def pack(self, k: Any, target: Any, first: Any, end: Any) -> None:
        """Emits the copy of one step of rows `first` to below `end` to its place in the packed panel that begins at address
        `target`. k: the offset of the step in a packed row, in bytes. Int8 weights become bfloat16; in memory the step is then k /
        2 bytes into its row."""
        builder = self.builder
        step = builder.gep(target, [builder.mul(k, _constant(PANEL))])
        at = builder.lshr(k, _constant(1)) if self._of_int8 else k

        def copy(row: Any, place: Any) -> None:
            to, source = builder.gep(step, [builder.mul(row, _constant(STEP_BYTES))]), builder.gep(place, [at])
            _store(builder, _as_bfloats(builder, source) if self._of_int8 else _load(builder, source, PAIRS), to)
            prefetch_line(builder, builder.gep(source, [_constant(_PACKED_AHEAD_BYTES)]), 3)

        self.each(first, end, copy)


class _InTurn:
    """Emits code that prefetches the first `steps` steps of rows `first` to below `end`, one row after the other, a few cache lines
    at each call of `fetch`. The code keeps its progress on the stack. num_lines: the number of cache lines of all these rows."""

    def __init__(self, rows: _Rows, steps: Any, first: Any, end: Any) -> None:
        builder = self._builder = rows.builder
        self._rows, self._row_bytes = rows, builder.mul(steps, _constant(STEP_BYTES))
        self.num_lines = builder.mul(steps, builder.sub(end, first))
        self._left = cgutils.alloca_once_value(builder, self.num_lines)
        self._row, self._column = cgutils.alloca_once_value(builder, first), cgutils.alloca_once_value(builder, _constant(0))
        self._place = cgutils.alloca_once_value(builder, rows.place(first))  # address of the row

    def fetch(self, num_lines: Any) -> None:
        """Emits the prefetch of the next num_lines cache lines, or of those that remain if they are fewer."""
        builder, rows = self._builder, self._rows
        left = builder.load(self._left)
        some = builder.select(builder.icmp_signed("<", num_lines, left), num_lines, left)
        builder.store(builder.sub(left, some), self._left)
        with cgutils.for_range_slice(builder, _constant(0), some, _constant(1)):
            place, column = builder.load(self._place), builder.load(self._column)
            prefetch_line(builder, builder.gep(place, [column]))
            column = builder.add(column, _constant(STEP_BYTES))
            is_over = builder.icmp_signed("==", column, self._row_bytes)
            builder.store(builder.select(is_over, _constant(0), column), self._column)
            row = builder.add(builder.load(self._row), builder.zext(is_over, I64))
            builder.store(row, self._row)
            begins_half = builder.and_(is_over, builder.icmp_signed("==", row, _constant(TILE)))
            apart = builder.select(begins_half, builder.add(rows.stride, rows.jump), rows.stride)
            builder.store(builder.select(is_over, builder.gep(place, [apart]), place), self._place)


def _multiply(
    context: Any,
    builder: ir.IRBuilder,
    signature: Any,
    args: Any,
    num_columns: int,
    of_int8: bool,
    rows: _Rows | None,
    meanwhile: Callable[[Any], None],
) -> None:
    """Emits the matrix products of the function that tile_products describes. args: the arguments of that function, of which the
    first nine are used.

    rows: where the rows of the weights lie in memory; None: the weights are packed. of_int8: weights and columns are int8.
    meanwhile: called once, with the step's offset k in bytes from the start of a row, to emit further instructions into the loop
    over the steps."""
    _, begin, _, words_begin, columns_apart, count, anew, _, sums_begin = args[:9]
    weights = _address(context, builder, signature, args, 0, begin)
    columns = _address(context, builder, signature, args, 2, words_begin)
    column_bytes = builder.mul(columns_apart, _constant(WORD_BYTES))
    to = _address(context, builder, signature, args, 7, sums_begin)
    halves = [weights, builder.gep(weights, [_constant(TILE_BYTES)])]
    stride, step_bytes = _constant(STEP_BYTES), PANEL * STEP_BYTES
    if rows is not None:
        halves = [weights, builder.gep(weights, [builder.add(builder.mul(rows.stride, _constant(TILE)), rows.jump)])]
        stride, step_bytes = rows.stride, STEP_BYTES
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
            place = builder.gep(halves[half], [builder.mul(k, _constant(step_bytes // STEP_BYTES))])
            _call(builder, "tileloadd64", _tile(4 + half), place, stride)
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
    """Returns 16 vectors of 16 words transposed: word j of vector i becomes word i of vector j."""
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
    """Writes a tile of 16 columns to out from word out_at on, from 16 words of each of num_rows (1 to 16) rows, which begin at
    words[at] and are `stride` words apart: first the first words of all 16 rows, then the second ones, and so on. Missing rows are
    copies of the last one."""

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


def write_tile(of_digits: bool) -> Any:
    """Returns a function (weight, sums, at, units, unit_at, factors, factors_at, num_rows, out, out_at, width) for kernels. It
    writes the sums [16 outputs, 16 columns] from index `at` on to 16 outputs of num_rows (1 to 16) rows of out (bfloat16), which
    are `width` elements apart, from index out_at on. weight is read for its element type alone.

    of_digits: whether the sums are int32 and belong to digits: the sums of the high digits, followed by 16 times 16 sums of the low
    digits. A result is then (256 * high + low) * units[unit_at + row]. False: the sums are float32. With int8 weights the result is
    multiplied by factors[factors_at + output]. Finally factors[factors_at + 32 + output] is added."""

    @intrinsic
    def write(
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
        scales = weight.dtype == types.int8

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
                    if scales:
                        row = builder.fmul(row, load(5, factors_begin))
                    narrow = builder.fptrunc(builder.fadd(row, added), HALF_BFLOATS)
                    place = builder.add(out_begin, builder.mul(row_width, _constant(number)))
                    _store(builder, narrow, _address(context, builder, signature, args, 8, place))
            return context.get_dummy_value()

        places = (types.int64,)
        arrays = (weight, sums, *places, units, *places, factors, *places * 2, out, *places * 2)
        return types.void(*arrays), generate

    return write
