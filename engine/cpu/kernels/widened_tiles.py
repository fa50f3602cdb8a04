"""Generates the inner loops (tiles) of products whose weights (bfloat16 or int8) are widened to float32, for processors that cannot
multiply shorter formats.

The loops are generated as LLVM code because Numba's vectoriser does not keep a tile's sums in registers. Vectors are as wide as the
processor's registers, and tiles as large as its number of registers allows, so this file serves AVX-512, AVX2, NEON and processors
without them.

Shapes: W (WIDTH) float32 values in a vector, K inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.bits import prefetch_line
from engine.cpu.kernels.vectors import I32, I64, fma, fold, shuffle, vector
from engine.host.processor import this_processor

_FEATURES = this_processor().features
WIDTH = 16 if "avx512" in _FEATURES else 8 if "avx2" in _FEATURES else 4
HAS_32_REGISTERS = bool({"avx512", "neon"} & _FEATURES)
STEP = 2 * WIDTH  # inputs of a step, as many as a vector of bfloat16 pairs has
# A tile of sums across K (add_products): its rows and outputs. Each sum is a vector whose lanes are added up at the end.
ROWS, OUTPUTS = (6, 4) if HAS_32_REGISTERS else (3, 3)
# A tile of sums across outputs (add_packed): its rows, and its vectors of outputs.
PACKED_ROWS, _PACKED_VECTORS = (12, 2) if WIDTH == 16 else (6, 4) if HAS_32_REGISTERS else (6, 2)
PANEL = _PACKED_VECTORS * WIDTH  # outputs whose weights are packed together
TILE_FLOATS = ROWS * OUTPUTS * WIDTH  # float32 values in a tile's sums across K
PACKED_BEHIND = -(-PACKED_ROWS // WIDTH) * WIDTH  # float32 that lay_out_step may write behind its own
_BLOCK = 128  # inputs that are prefetched of each weight row at a time, and that are multiplied before the next
_LINE_BYTES = 64

_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), WIDTH), ir.VectorType(I32, WIDTH)


def with_data(context: Any, builder: Any, signature: Any, args: Any) -> list[Any]:
    """Returns the arguments of an intrinsic, with each Numba array replaced by a pointer to its first element."""
    return [
        context.make_array(kind)(context, builder, arg).data if isinstance(kind, types.Array) else arg
        for kind, arg in zip(signature.args, args, strict=True)
    ]


def _load(builder: ir.IRBuilder, data: Any, at: Any, kind: ir.Type = _FLOATS, align: int = 4) -> Any:
    return builder.load(builder.bitcast(builder.gep(data, [at]), kind.as_pointer()), align=align)


def _store(builder: ir.IRBuilder, value: Any, data: Any, at: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(data, [at]), value.type.as_pointer()), align=4)


def _halves(builder: ir.IRBuilder, pairs: Any) -> list[Any]:
    """Returns the even and the odd elements of a vector of W bfloat16 pairs, each as a vector of W float32."""
    even, odd = builder.shl(pairs, vector(_WORDS, 16)), builder.and_(pairs, vector(_WORDS, 0xFFFF0000))
    return [builder.bitcast(even, _FLOATS), builder.bitcast(odd, _FLOATS)]


def _bytes_as_floats(builder: ir.IRBuilder, data: Any, at: Any) -> Any:
    """Returns the W int8 from index `at` of data on as a vector of float32."""
    return builder.sitofp(_load(builder, data, at, ir.VectorType(ir.IntType(8), WIDTH), 1), _FLOATS)


def call_own(builder: ir.IRBuilder, name: str, args: list[Any], body: Callable[[Any, list[Any]], None]) -> None:
    """Emits the code as a separate LLVM function `name` and a call of it with these arguments. Inside the loops of its caller the
    compiler would keep neither a tile's sums nor its addresses in registers (16 rows take twice as long).

    body(builder, args) generates the function's code, unless the module already has a function of this name."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [arg.type for arg in args]), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        function.attributes.add("nounwind")
        own = ir.IRBuilder(function.append_basic_block("entry"))
        body(own, list(function.args))
        own.ret_void()
    builder.call(function, args)


@contextmanager
def _in_registers(builder: ir.IRBuilder, data: Any, begin: Any, count: int, is_fresh: Any) -> Iterator[list[Any]]:
    """Yields `count` pointers to vectors of W float32 sums, which the compiler keeps in registers. At the beginning the sums are
    loaded from data[begin] on, or set to 0 if is_fresh (i64) is not 0; at the end of the context they are stored to data[begin]
    on."""
    places = [builder.add(begin, I64(number * WIDTH)) for number in range(count)]
    totals = [cgutils.alloca_once(builder, _FLOATS) for _ in places]
    for total in totals:
        builder.store(vector(_FLOATS, 0.0), total)
    with builder.if_then(builder.icmp_signed("==", is_fresh, I64(0))):
        for total, place in zip(totals, places, strict=True):
            builder.store(_load(builder, data, place), total)
    yield totals
    for total, place in zip(totals, places, strict=True):
        _store(builder, builder.load(total), data, place)


@intrinsic
def widen_weight(typing_context: Any, value: Any) -> Any:
    """Returns a weight, bfloat16 bits or int8, as float32, which is exact."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value == types.int8:
            return builder.sitofp(args[0], ir.FloatType())
        return builder.bitcast(builder.shl(builder.zext(args[0], I32), I32(16)), ir.FloatType())

    return types.float32(value), generate


@intrinsic
def widen_step(typing_context: Any, x: Any, at: Any, to: Any, to_at: Any, weight: Any) -> Any:
    """Widens STEP bfloat16 elements of x, from index `at` on, to float32, and writes them to `to` from index to_at on, in the order
    that add_products needs: for bfloat16 weights the elements of even index, then those of odd index; for int8 weights all in
    order. weight: read for its element type alone."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, at, target, to_at, _ = with_data(context, builder, signature, args)
        if weight.dtype == types.int8:
            parts = []
            for half in range(2):
                bits = _load(builder, source, builder.add(at, I64(half * WIDTH)), ir.VectorType(ir.IntType(16), WIDTH), 2)
                parts.append(builder.bitcast(builder.shl(builder.zext(bits, _WORDS), vector(_WORDS, 16)), _FLOATS))
        else:
            parts = _halves(builder, _load(builder, source, at, _WORDS, 2))
        for half, part in enumerate(parts):
            _store(builder, part, target, builder.add(to_at, I64(half * WIDTH)))
        return context.get_dummy_value()

    return types.void(x, types.int64, to, types.int64, weight), generate


def add_products(num_rows: int) -> Any:
    """Returns a function (x, x_at, weight, weight_at, width, steps, ahead, fetched, fresh, sums, sums_at) for kernels. It
    multiplies `steps` steps of STEP inputs of num_rows rows with OUTPUTS weight rows, and adds the products to the tile of sums
    [num_rows, OUTPUTS, W] at sums_at. If fresh, the sums start from 0.

    x: float32 [steps, num_rows, STEP], as widen_step writes it. width: elements from one weight row to the next. Meanwhile
    `fetched` (1 to OUTPUTS) weight rows that lie `ahead` elements after these are brought into the second-level cache. Tiles of
    different rows that use the same weights divide this prefetching among them."""

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        x_at: Any,
        weight: Any,
        weight_at: Any,
        width: Any,
        steps: Any,
        ahead: Any,
        fetched: Any,
        fresh: Any,
        sums: Any,
        sums_at: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            own = with_data(context, builder, signature, args)
            call_own(builder, f"add_products_{num_rows}_{weight.dtype}", own, body)
            return context.get_dummy_value()

        def body(builder: Any, args: list[Any]) -> None:
            rows, x_begin, weights, begin, row, count, ahead_by, num_fetched, is_fresh, totals_data, sums_begin = args
            weights_at = [builder.add(begin, builder.mul(row, I64(n))) for n in range(OUTPUTS)]
            fetch_at = []
            for n in range(OUTPUTS):
                fetch_row = builder.udiv(builder.mul(num_fetched, I64(n)), I64(OUTPUTS))
                fetch_at.append(builder.add(builder.add(begin, ahead_by), builder.mul(fetch_row, row)))
            with (
                _in_registers(builder, totals_data, sums_begin, num_rows * OUTPUTS, is_fresh) as totals,
                cgutils.for_range_slice(builder, I64(0), count, I64(1)) as (step, _),
            ):
                k = builder.mul(step, I64(STEP))
                row_at = builder.add(x_begin, builder.mul(k, I64(num_rows)))
                pairs = []
                if weight.dtype != types.int8:
                    pairs = [_load(builder, weights, builder.add(at, k), _WORDS, 2) for at in weights_at]
                for at in fetch_at:
                    prefetch_line(builder, builder.gep(weights, [builder.add(at, k)]))
                for half in range(2):
                    if weight.dtype == types.int8:
                        places = [builder.add(builder.add(at, k), I64(half * WIDTH)) for at in weights_at]
                        columns = [_bytes_as_floats(builder, weights, place) for place in places]
                    else:
                        columns = [_halves(builder, pair)[half] for pair in pairs]
                    for r in range(num_rows):
                        own = _load(builder, rows, builder.add(row_at, I64(r * STEP + half * WIDTH)))
                        for n, column in enumerate(columns):
                            total = totals[r * OUTPUTS + n]
                            builder.store(fma(builder, own, column, builder.load(total)), total)

        one = types.int64
        return types.void(x, one, weight, *(one,) * 6, sums, one), generate

    return tile


@intrinsic
def fold_tile(typing_context: Any, sums: Any, at: Any, num_rows: Any, out: Any, out_at: Any, stride: Any) -> Any:
    """Adds up the W lanes of each sum of a tile [ROWS, OUTPUTS, W], which begins at index `at`, for its first num_rows rows. Writes
    the OUTPUTS results of each row to out from out_at on, with rows `stride` elements apart. out must have space for ROWS rows,
    because some after the first num_rows may be overwritten."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, at, count, target, to, row_stride = with_data(context, builder, signature, args)
        at_once = WIDTH // OUTPUTS
        for first in range(0, ROWS, at_once):
            rows = range(first, min(first + at_once, ROWS))
            with builder.if_then(builder.icmp_signed(">", count, I64(first))):
                numbers = [r * OUTPUTS + n for r in rows for n in range(OUTPUTS)]
                folded = fold(builder, [_load(builder, source, builder.add(at, I64(number * WIDTH))) for number in numbers])
                for r in rows:  # rows after the last are written, too, as out has space for them
                    lanes = ir.Constant(ir.VectorType(I32, OUTPUTS), [(r - first) * OUTPUTS + n for n in range(OUTPUTS)])
                    _store(
                        builder,
                        builder.shuffle_vector(folded, folded, lanes),
                        target,
                        builder.add(to, builder.mul(row_stride, I64(r))),
                    )
        return context.get_dummy_value()

    one = types.int64
    return types.void(sums, one, one, out, one, one), generate


@intrinsic
def pack_step(typing_context: Any, weight: Any, at: Any, width: Any, packed: Any, to_at: Any) -> Any:
    """Widens and transposes STEP inputs (W with int8 weights), from index `at` on, of W weight rows, which are `width` elements
    apart. Each input becomes a vector of W float32, one for each row. The vectors are written to packed from to_at on, PANEL
    elements apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights, begin, row, target, to_begin = with_data(context, builder, signature, args)
        rows = [builder.add(begin, builder.mul(row, I64(n))) for n in range(WIDTH)]
        if weight.dtype == types.int8:
            vectors = [_bytes_as_floats(builder, weights, place) for place in rows]
            columns = _transposed(builder, vectors)
        else:
            pairs = _transposed(builder, [_load(builder, weights, place, _WORDS, 2) for place in rows])
            columns = [half for pair in pairs for half in _halves(builder, pair)]
        for k, column in enumerate(columns):
            _store(builder, column, target, builder.add(to_begin, I64(k * PANEL)))
        return context.get_dummy_value()

    return types.void(weight, types.int64, types.int64, packed, types.int64), generate


@intrinsic
def lay_out_step(typing_context: Any, x: Any, at: Any, num_rows: Any, columns: Any, to_at: Any) -> Any:
    """Widens and transposes STEP bfloat16 inputs, from index `at` on, of num_rows rows of x [R, K] (PACKED_ROWS at most), and
    writes them as float32 [STEP, num_rows] to `columns` from to_at on. Up to PACKED_BEHIND floats after these are overwritten,
    too."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, begin, count, target, to_begin = with_data(context, builder, signature, args)
        row = builder.extract_value(context.make_array(signature.args[0])(context, builder, args[0]).shape, 1)
        last, groups = builder.sub(count, I64(1)), []
        for first in range(0, PACKED_ROWS, WIDTH):
            loaded = []
            for number in range(first, first + WIDTH):
                # Lanes behind the last row are read from that row; what is stored of them is overwritten or never read.
                own = builder.select(builder.icmp_signed("<", last, I64(number)), last, I64(number))
                loaded.append(_load(builder, source, builder.add(begin, builder.mul(own, row)), _WORDS, 2))
            groups.append([half for pair in _transposed(builder, loaded) for half in _halves(builder, pair)])
        for k in range(STEP):
            to = builder.add(to_begin, builder.mul(count, I64(k)))
            for group, columns in enumerate(groups):
                _store(builder, columns[k], target, builder.add(to, I64(group * WIDTH)))
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, columns, types.int64), generate


def packed_step(of_int8: bool) -> int:
    """Returns the number of inputs that pack_step takes at a time from weights that are int8 (of_int8), or bfloat16."""
    return WIDTH if of_int8 else STEP


def _transposed(builder: ir.IRBuilder, vectors: list[Any]) -> list[Any]:
    """Returns W vectors of W lanes transposed: lane j of vector i becomes lane i of vector j. The list `vectors` is overwritten."""
    span = WIDTH // 2
    while span:
        lower = [lane if lane // span % 2 == 0 else lane - span + WIDTH for lane in range(WIDTH)]
        upper = [lane + span if lane // span % 2 == 0 else lane + WIDTH for lane in range(WIDTH)]
        for first in (number for number in range(WIDTH) if number // span % 2 == 0):
            left, right = vectors[first], vectors[first + span]
            vectors[first], vectors[first + span] = (shuffle(builder, left, right, lanes) for lanes in (lower, upper))
        span //= 2
    return vectors


def add_packed(num_rows: int) -> Any:
    """Returns a function (x, x_at, packed, count, fresh, sums, sums_at, weight, fetch_at, width, fetched) for kernels. It
    multiplies `count` inputs of num_rows rows with a packed panel of weights, and adds the products to the sums [num_rows, PANEL]
    at sums_at. If fresh, the sums start from 0.

    x: float32 [count, num_rows] from x_at on. packed: [count, PANEL]. Meanwhile the same inputs of `fetched` weight rows, which
    begin at fetch_at and are `width` elements apart, are brought into the second-level cache."""

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        x_at: Any,
        packed: Any,
        count: Any,
        fresh: Any,
        sums: Any,
        sums_at: Any,
        weight: Any,
        fetch_at: Any,
        width: Any,
        fetched: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            own = with_data(context, builder, signature, args)
            call_own(builder, f"add_packed_{num_rows}_{weight.dtype}", own, body)
            return context.get_dummy_value()

        def body(builder: Any, args: list[Any]) -> None:
            rows, x_begin, panel, num_inputs, is_fresh, totals_data, sums_begin, weights, fetch_begin, row, num_fetched = args
            with (
                _in_registers(builder, totals_data, sums_begin, num_rows * _PACKED_VECTORS, is_fresh) as totals,
                cgutils.for_range_slice(builder, I64(0), num_inputs, I64(_BLOCK)) as (block, _),
            ):
                with cgutils.for_range_slice(builder, I64(0), num_fetched, I64(1)) as (n, _):
                    at = builder.add(builder.add(fetch_begin, builder.mul(n, row)), block)
                    for line in range(0, _BLOCK, _LINE_BYTES // (weight.dtype.bitwidth // 8)):
                        prefetch_line(builder, builder.gep(weights, [builder.add(at, I64(line))]))
                end = builder.add(block, I64(_BLOCK))
                end = builder.select(builder.icmp_signed("<", end, num_inputs), end, num_inputs)
                with cgutils.for_range_slice(builder, block, end, I64(1)) as (k, _):
                    row_at, panel_at = builder.add(x_begin, builder.mul(k, I64(num_rows))), builder.mul(k, I64(PANEL))
                    columns = [_load(builder, panel, builder.add(panel_at, I64(v * WIDTH))) for v in range(_PACKED_VECTORS)]
                    for r in range(num_rows):
                        single = builder.load(builder.gep(rows, [builder.add(row_at, I64(r))]))
                        lane = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), single, I32(0))
                        own = shuffle(builder, lane, lane, [0] * WIDTH)
                        for v, column in enumerate(columns):
                            total = totals[r * _PACKED_VECTORS + v]
                            builder.store(fma(builder, own, column, builder.load(total)), total)

        one = types.int64
        return types.void(x, one, packed, one, one, sums, one, weight, one, one, one), generate

    return tile
