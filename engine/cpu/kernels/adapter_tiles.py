"""Generates the inner loops (tiles) of products with LoRA adapters' matrices, for adapters.py. An adapter of rank r adds (x @
down.T) @ up to a product, with "down" [r, K inputs] and "up" [r, N outputs].

A tile multiplies either one token, whose adapter's matrices are read from memory for it alone, or ROWS tokens of one adapter.
Elements are float32, or bfloat16 as uint16 bits, and are widened as they are read; sums are float32. The loops are generated as
LLVM code because Numba's vectoriser does not keep a tile's sums in registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.bits import narrow_bits, prefetch_line
from engine.cpu.kernels.vectors import I32, I64, fma, fold, shuffle, vector
from engine.cpu.kernels.widened_tiles import HAS_32_REGISTERS, WIDTH, call_own, with_data

ROWS = 4 if HAS_32_REGISTERS else 2
RANKS = 8  # rows of "down" that a tile of one token takes; ranks are a multiple of it (loader/adapters/layout.py)
SOME_RANKS = 4  # that a tile of ROWS tokens takes
COLUMNS = 64  # columns of "up" that are computed one after the other
_MOST_SUMS = 8  # vectors of sums of a tile of one token
ONE_VECTORS = min(_MOST_SUMS, COLUMNS // WIDTH)
SOME_VECTORS = 4 if HAS_32_REGISTERS else 2
UP_ROWS = 4  # tokens of a tile with "up", which reads one number of each token for a vector of columns
_LINE_BYTES = 64

_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), WIDTH), ir.VectorType(I32, WIDTH)
_Two = tuple[Any, Any]  # two vectors of float32


def down_step(item_bytes: int) -> int:
    """Returns how many inputs of a row the function of down_tile multiplies per iteration: a cache line of elements, or two vectors
    of float32 if that is more. item_bytes: size of an element."""
    return max(_LINE_BYTES // item_bytes, 2 * WIDTH)


def _load_two(builder: ir.IRBuilder, element: types.Type, data: Any, at: Any) -> _Two:
    """Emits the load of 2 * WIDTH elements of `data` from index `at` on, and returns them as two vectors of float32. Elements that
    are float32 stay in order. Of bfloat16 elements, the first vector has those at even indices and the second those at odd indices;
    sums of products do not depend on the order, and _store_two restores it."""
    if element == types.float32:
        first, second = (builder.gep(data, [builder.add(at, I64(half * WIDTH))]) for half in range(2))
        return tuple(builder.load(builder.bitcast(place, _FLOATS.as_pointer()), align=4) for place in (first, second))
    pairs = builder.load(builder.bitcast(builder.gep(data, [at]), _WORDS.as_pointer()), align=2)
    even, odd = builder.shl(pairs, vector(_WORDS, 16)), builder.and_(pairs, vector(_WORDS, 0xFFFF0000))
    return builder.bitcast(even, _FLOATS), builder.bitcast(odd, _FLOATS)


def _store_two(builder: ir.IRBuilder, element: types.Type, values: _Two, data: Any, at: Any) -> None:
    """Emits the store of two vectors of WIDTH float32 each as 2 * WIDTH elements of `data` from index `at` on, rounded to the
    element type. values: the vectors, in the order in which _load_two returns them."""
    if element == types.float32:
        for half, value in enumerate(values):
            place = builder.gep(data, [builder.add(at, I64(half * WIDTH))])
            builder.store(value, builder.bitcast(place, _FLOATS.as_pointer()), align=4)
        return
    even, odd = (builder.zext(narrow_bits(builder, value), _WORDS) for value in values)
    pairs = builder.or_(even, builder.shl(odd, vector(_WORDS, 16)))
    builder.store(pairs, builder.bitcast(builder.gep(data, [at]), _WORDS.as_pointer()), align=2)


def _zeros(builder: ir.IRBuilder, count: int) -> list[Any]:
    """Emits `count` vectors of WIDTH float32 zeros on the stack, for sums, and returns pointers to them."""
    places = [cgutils.alloca_once(builder, _FLOATS) for _ in range(count)]
    for place in places:
        builder.store(vector(_FLOATS, 0.0), place)
    return places


def _sum(builder: ir.IRBuilder, *indices: Any) -> Any:
    total, *more = indices
    for index in more:
        total = builder.add(total, index)
    return total


def _line_elements(element: types.Type) -> int:
    return _LINE_BYTES // (element.bitwidth // 8)


def down_tile(num_rows: int, num_ranks: int) -> Any:
    """Returns a function (x, x_at, memory, at, width, count, made, made_at, made_width) for kernels. It computes the dot products
    of num_rows rows of x, from index x_at on, with num_ranks rows of "down", from index `at` of memory on.

    width: elements from one row to the next, in x and in "down". count: how many inputs of each row are multiplied, a multiple of
    down_step. The product of row i with rank j is written as float32 to made[made_at + i * made_width + j]. A tile of one row also
    prefetches the num_ranks rows of memory that follow."""

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        x_at: Any,
        memory: Any,
        at: Any,
        width: Any,
        count: Any,
        made: Any,
        made_at: Any,
        made_width: Any,
    ) -> Any:
        element = memory.dtype

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            own = with_data(context, builder, signature, args)
            call_own(builder, f"adapter_down_{num_rows}_{element}", own, body)
            return context.get_dummy_value()

        def body(builder: Any, args: list[Any]) -> None:
            rows, x_begin, downs, begin, row, num_inputs, target, target_begin, target_row = args
            x_rows = [builder.add(x_begin, builder.mul(row, I64(r))) for r in range(num_rows)]
            down_rows = [builder.add(begin, builder.mul(row, I64(n))) for n in range(num_ranks)]
            ahead = builder.mul(row, I64(num_ranks))
            totals = _zeros(builder, num_rows * num_ranks)
            step = down_step(element.bitwidth // 8)
            with cgutils.for_range_slice(builder, I64(0), num_inputs, I64(step)) as (k, _):
                for line in range(0, step, _line_elements(element)) if num_rows == 1 else ():
                    for at in down_rows:
                        prefetch_line(builder, builder.gep(downs, [builder.add(builder.add(at, ahead), builder.add(k, I64(line)))]))
                for first in range(0, step, 2 * WIDTH):
                    columns = [_load_two(builder, element, downs, _sum(builder, at, k, I64(first))) for at in down_rows]
                    owns = [_load_two(builder, element, rows, _sum(builder, at, k, I64(first))) for at in x_rows]
                    for half in range(2):
                        for number, total in enumerate(totals):
                            r, n = divmod(number, num_ranks)
                            builder.store(fma(builder, owns[r][half], columns[n][half], builder.load(total)), total)
            run = min(num_ranks, WIDTH)
            for first in range(0, len(totals), WIDTH):
                some = totals[first : first + WIDTH]
                folded = fold(builder, [builder.load(total) for total in some])
                for lane in range(0, len(some), run):
                    r, n = divmod(first + lane, num_ranks)
                    to = _sum(builder, target_begin, builder.mul(target_row, I64(r)), I64(n))
                    values = shuffle(builder, folded, folded, list(range(lane, lane + run)))
                    builder.store(values, builder.bitcast(builder.gep(target, [to]), values.type.as_pointer()), align=4)

        one = types.int64
        return types.void(x, one, memory, one, one, one, made, one, one), generate

    return tile


def up_tile(num_rows: int, num_vectors: int) -> Any:
    """Returns a function (made, made_at, made_width, rank, memory, at, width, out, out_at, out_width) for kernels. It adds the
    matrix product of made [num_rows, rank] float32, from index made_at on, with `rank` rows of "up", from index `at` of memory on,
    to num_rows rows of out, in num_vectors * WIDTH columns from index out_at on.

    made_width, width, out_width: elements from one row to the next in made, memory and out. A tile of one row also prefetches the
    columns of "up" that follow."""

    @intrinsic
    def tile(
        typing_context: Any,
        made: Any,
        made_at: Any,
        made_width: Any,
        rank: Any,
        memory: Any,
        at: Any,
        width: Any,
        out: Any,
        out_at: Any,
        out_width: Any,
    ) -> Any:
        element = memory.dtype

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            own = with_data(context, builder, signature, args)
            call_own(builder, f"adapter_up_{num_rows}_{element}", own, body)
            return context.get_dummy_value()

        def body(builder: Any, args: list[Any]) -> None:
            source, begin, source_row, num_ranks, ups, up_begin, up_row, target, target_begin, target_row = args
            totals = _zeros(builder, num_rows * num_vectors)
            source_rows = [builder.add(begin, builder.mul(source_row, I64(r))) for r in range(num_rows)]
            with cgutils.for_range_slice(builder, I64(0), num_ranks, I64(1)) as (j, _):
                place = builder.add(up_begin, builder.mul(j, up_row))
                if num_rows == 1:
                    for column in range(0, num_vectors * WIDTH, _line_elements(element)):
                        prefetch_line(builder, builder.gep(ups, [builder.add(place, I64(num_vectors * WIDTH + column))]))
                twos = [_load_two(builder, element, ups, builder.add(place, I64(v * WIDTH))) for v in range(0, num_vectors, 2)]
                columns = [column for two in twos for column in two]
                for r, at in enumerate(source_rows):
                    single = builder.load(builder.gep(source, [builder.add(at, j)]))
                    lane = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), single, I32(0))
                    own = shuffle(builder, lane, lane, [0] * WIDTH)
                    for v, column in enumerate(columns):
                        total = totals[r * num_vectors + v]
                        builder.store(fma(builder, own, column, builder.load(total)), total)
            for number in range(0, len(totals), 2):
                r, v = divmod(number, num_vectors)
                to = _sum(builder, target_begin, builder.mul(target_row, I64(r)), I64(v * WIDTH))
                before = _load_two(builder, element, target, to)
                first, second = (builder.fadd(before[half], builder.load(totals[number + half])) for half in range(2))
                _store_two(builder, element, (first, second), target, to)

        one = types.int64
        return types.void(made, one, one, one, memory, one, one, out, one, one), generate

    return tile
