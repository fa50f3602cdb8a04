"""Packs and unpacks the weights of a packed matrix (loader/formats/packed_rows.py), 64 at a time. They are unpacked into memory, or
into registers of the tile that multiplies them.

A weight's exponent is its row's base plus a code of three bits; code 7 marks an escape, whose exponent is stored apart in a list.
The codes of 64 weights are three planes (the codes' lowest, middle and highest bits), each a mask of the weights to whose exponents
1, 2 or 4 is added. On processors with AVX512-VBMI2, one instruction then brings the escapes from their list to their places.
Exponents and bytes are interleaved and rotated by a bit, which gives the weights. On other processors the escapes are put into the
weights last, one by one.

The code is generated as LLVM code because Numba's vectoriser does not keep a tile's sums in registers (see vectors.py)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.bits import HAS_BFLOAT16_PRODUCTS, prefetch_line
from engine.cpu.kernels.vectors import I32, I64, PAIRS, SUMS, Loader, add_products, fenced, fold, shuffle, splat, vector
from engine.host import processor
from loader.formats.packed_rows import BLOCK, ESCAPE, NUM_PLANES, ORDER, PANEL_ROWS

HAS_EXPANSION = processor.runs("escapes_in_place")
MOST_TILE_ROWS = 2 * PANEL_ROWS
IS_FUSED = HAS_EXPANSION and HAS_BFLOAT16_PRODUCTS
_AHEAD = 8192  # bytes of the body between what is prefetched and what is used
_AHEAD_PLANES = _AHEAD // BLOCK * NUM_PLANES  # the same of the codes
_LINE_PLANES = 8  # in a cache line
# The same of escapes, in bytes: more than are in as much of the body. Without it products of one row take a tenth longer.
_AHEAD_ESCAPES = 256
_BYTE = ir.IntType(8)
_BYTES, _BITS = ir.VectorType(_BYTE, BLOCK), ir.VectorType(ir.IntType(1), BLOCK)
_WORDS = ir.VectorType(ir.IntType(16), BLOCK // 2)
_PLACES = [ORDER.index(weight) for weight in range(BLOCK)]
# of weights whose sign was rotated to the lowest end: the bytes of their mantissas, and of their exponents, in the order of places
_MANTISSAS, _EXPONENTS = [2 * weight for weight in ORDER], [2 * weight + 1 for weight in ORDER]
# of a vector of bytes and one of exponents, those of the first 32 weights, and of the others
_HALVES = [[number for place in places for number in (place, BLOCK + place)] for places in (_PLACES[:32], _PLACES[32:])]


def _load(builder: ir.IRBuilder, data: Any, at: Any, kind: ir.Type, align: int = 1) -> Any:
    return builder.load(builder.bitcast(builder.gep(data, [at]), kind.as_pointer()), align=align)


def _call(builder: ir.IRBuilder, name: str, kind: ir.Type, args: list[Any]) -> Any:
    function = ir.FunctionType(kind, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), args)


def _opaque(builder: ir.IRBuilder, value: int) -> Any:
    """Returns 64 bytes of this value, as a value that the compiler does not know to be constant. If it knew, it would compile an
    addition of 1 to two instructions."""
    return builder.bitcast(fenced(builder, builder.bitcast(vector(_BYTES, value), SUMS)), _BYTES)


def _decoded(builder: ir.IRBuilder, body: Any, planes: list[Any], base: Any, escapes: Any, at: Any) -> tuple[list[Any], Any]:
    """Returns 64 weights as two vectors of 32, and a mask (i64) of the places of escapes. Without HAS_EXPANSION the weights at
    these places have no meaning. body: the block's 64 bytes. planes: its three planes of codes. base: the row's base, in all 64
    lanes. escapes, at: the list of escapes, and the index of the block's first one."""
    exponents = base
    for bit, plane in enumerate(planes):
        raised = builder.add(exponents, _opaque(builder, 1 << bit))
        exponents = builder.select(builder.bitcast(plane, _BITS), raised, exponents)
    escaped = planes[0]
    for plane in planes[1:]:
        escaped = builder.and_(escaped, plane)
    if HAS_EXPANSION:
        listed = _load(builder, escapes, at, _BYTES)
        args = [listed, exponents, builder.bitcast(escaped, _BITS)]
        exponents = _call(builder, "llvm.x86.avx512.mask.expand.v64i8", _BYTES, args)
    weights = []
    for half in _HALVES:
        words = builder.bitcast(shuffle(builder, body, exponents, half), _WORDS)
        weights.append(_call(builder, f"llvm.fshr.v{_WORDS.count}i16", _WORDS, [words, words, vector(_WORDS, 1)]))
    return weights, escaped


@intrinsic
def count_bits(typing_context: Any, mask: Any) -> Any:
    """Returns how many bits of an int64 are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "llvm.ctpop.i64", I64, args)

    return types.int64(types.int64), generate


@intrinsic
def lowest_bit(typing_context: Any, mask: Any) -> Any:
    """Returns the index of the lowest set bit of an int64, which must not be 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "llvm.cttz.i64", I64, [args[0], ir.Constant(ir.IntType(1), 1)])

    return types.int64(types.int64), generate


@intrinsic
def unpack_block(
    typing_context: Any, body: Any, codes: Any, number: Any, base: Any, escapes: Any, escapes_at: Any, out: Any, out_at: Any
) -> Any:
    """Unpacks a block of 64 weights of a row to out (uint16) from out_at on. Returns a mask (int64) of the places (in ORDER) of
    escapes; without HAS_EXPANSION the caller must still write the exponents of these weights. number: the block's number, counted
    over all panels and rows in order. base: the row's base."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bytes_data, planes_data, escapes_data, target = (
            context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 1, 4, 6)
        )
        own = builder.mul(args[2], I64(BLOCK))
        prefetch_line(builder, builder.gep(bytes_data, [builder.add(own, I64(_AHEAD))]))
        planes_at = builder.mul(args[2], I64(NUM_PLANES))
        prefetch_line(builder, builder.gep(planes_data, [builder.add(planes_at, I64(_AHEAD_PLANES))]))
        prefetch_line(builder, builder.gep(escapes_data, [builder.add(args[5], I64(_AHEAD_ESCAPES))]))
        planes = [_load(builder, planes_data, builder.add(planes_at, I64(plane)), I64, 8) for plane in range(NUM_PLANES)]
        base_lanes = splat(builder, args[3], _BYTES)
        weights, escaped = _decoded(builder, _load(builder, bytes_data, own, _BYTES), planes, base_lanes, escapes_data, args[5])
        for half, part in enumerate(weights):
            place = builder.gep(target, [builder.add(args[7], I64(half * _WORDS.count))])
            builder.store(part, builder.bitcast(place, _WORDS.as_pointer()), align=2)
        return escaped

    one = types.int64
    return one(body, codes, one, types.uint8, escapes, one, out, one), generate


@intrinsic
def pack_block(
    typing_context: Any, weights: Any, at: Any, base: Any, number: Any, body: Any, codes: Any, escapes: Any, escapes_at: Any
) -> Any:
    """Packs the 64 weights (uint16) from index `at` on as one block of a row. Returns a mask (int64) of the places (in ORDER) of
    escapes. With HAS_EXPANSION their exponents are written to escapes from escapes_at on, where 64 bytes are overwritten; without
    it the caller must write them. base: the row's base. number: the block's number, counted over all panels and rows in order."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, bytes_data, planes_data, escapes_data = (
            context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 4, 5, 6)
        )
        rotated = []
        for half in range(2):
            words = _load(builder, source, builder.add(args[1], I64(half * _WORDS.count)), _WORDS, 2)
            args_of_turn = [words, words, vector(_WORDS, 1)]
            rotated.append(builder.bitcast(_call(builder, f"llvm.fshl.v{_WORDS.count}i16", _WORDS, args_of_turn), _BYTES))
        exponents = shuffle(builder, rotated[0], rotated[1], _EXPONENTS)
        target = builder.gep(bytes_data, [builder.mul(args[3], I64(BLOCK))])
        builder.store(shuffle(builder, rotated[0], rotated[1], _MANTISSAS), builder.bitcast(target, _BYTES.as_pointer()), align=1)
        above = builder.sub(exponents, splat(builder, args[2], _BYTES))
        most = vector(_BYTES, ESCAPE)
        above = builder.select(builder.icmp_unsigned("<", above, most), above, most)
        planes_at = builder.mul(args[3], I64(NUM_PLANES))
        escaped = I64(-1)
        for plane in range(NUM_PLANES):
            is_set = builder.icmp_unsigned("!=", builder.and_(above, vector(_BYTES, 1 << plane)), vector(_BYTES, 0))
            own = builder.bitcast(is_set, I64)
            builder.store(own, builder.gep(planes_data, [builder.add(planes_at, I64(plane))]))
            escaped = builder.and_(escaped, own)
        if HAS_EXPANSION:
            args_of_list = [exponents, vector(_BYTES, 0), builder.bitcast(escaped, _BITS)]
            listed = _call(builder, "llvm.x86.avx512.mask.compress.v64i8", _BYTES, args_of_list)
            place = builder.gep(escapes_data, [args[7]])
            builder.store(listed, builder.bitcast(place, _BYTES.as_pointer()), align=1)
        return escaped

    one = types.int64
    return one(weights, one, types.uint8, one, body, codes, escapes, one), generate


def packed_tile(num_rows: int) -> Any:
    """Returns a function (x, count, width, body, codes, bases, panel, blocks, escapes, escapes_at, first, folded) for kernels, on
    processors with IS_FUSED. It multiplies num_rows rows of x with the weights of some outputs of a panel, outputs_of(num_rows) of
    them from `first` on. The result of row r and output n of these is written to folded[r * outputs + n].

    x: bfloat16 bits; the rows lie end to end, `width` elements each. count: number of rows in x, num_rows at most; results of
    further rows have no meaning. blocks: number of blocks of a row. escapes_at: where the panel's escapes begin. Products are added
    up in the same order as by dot_tile (tiles.py) and fold_sums."""
    num_outputs = outputs_of(num_rows)

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        count: Any,
        width: Any,
        body: Any,
        codes: Any,
        bases: Any,
        panel: Any,
        blocks: Any,
        escapes: Any,
        escapes_at: Any,
        first: Any,
        folded: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rows, bytes_data, planes_data, bases_data, escapes_data, out = (
                context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 3, 4, 5, 8, 11)
            )
            load_x = Loader(builder, rows, x.dtype, True)
            _, rows_there, row_width, _, _, _, number, of_panel, _, escapes_begin, first_output, _ = args
            last_row, rows_at = builder.sub(rows_there, I64(1)), []
            for r in range(num_rows):  # rows that are not there are the last one again
                own_row = builder.select(builder.icmp_signed("<", I64(r), last_row), I64(r), last_row)
                rows_at.append(builder.mul(row_width, own_row))
            first_base = builder.add(builder.mul(number, I64(PANEL_ROWS)), first_output)
            base_lanes = []
            for n in range(num_outputs):
                base = builder.load(builder.gep(bases_data, [builder.add(first_base, I64(n))]))
                base_lanes.append(splat(builder, base, _BYTES))
            first_block = builder.mul(builder.mul(number, of_panel), I64(PANEL_ROWS))
            totals = [cgutils.alloca_once(builder, SUMS) for _ in range(num_rows * num_outputs)]
            for total in totals:
                builder.store(vector(SUMS, 0.0), total)
            place = cgutils.alloca_once(builder, I64)
            builder.store(escapes_begin, place)

            def planes_of(row: Any) -> list[Any]:
                at = builder.mul(row, I64(NUM_PLANES))
                return [_load(builder, planes_data, builder.add(at, I64(plane)), I64, 8) for plane in range(NUM_PLANES)]

            def count_others(own: Any) -> tuple[Any, Any]:
                """Returns how many escapes the block has in the panel's rows before those of the tile, and how many in the rows
                after them. own: the number of the block in the panel's first row."""
                before = behind = I64(0)
                for n in range(num_outputs, PANEL_ROWS):
                    other = builder.and_(builder.add(first_output, I64(n)), I64(PANEL_ROWS - 1))
                    low, middle, high = planes_of(builder.add(own, other))
                    escaped = builder.and_(builder.and_(low, middle), high)
                    found = _call(builder, "llvm.ctpop.i64", I64, [escaped])
                    is_before = builder.icmp_signed("<", other, first_output)
                    before = builder.add(before, builder.select(is_before, found, I64(0)))
                    behind = builder.add(behind, builder.select(is_before, I64(0), found))
                return before, behind

            def load_inputs(r: int, k: Any, some: Any) -> list[Any]:
                loaded = []
                for half in range(2):
                    left = None if some is None else builder.sub(some, I32(half * load_x.step))
                    loaded.append(load_x(builder.add(rows_at[r], builder.add(k, I64(half * load_x.step))), left))
                return loaded

            def add(k: Any, some: Any = None) -> None:
                """Adds to `totals` the products of each row of x with the block of weights that begins at input k. some (i32): how
                many of the block's inputs x has; None: all of them."""
                own = builder.add(first_block, builder.mul(builder.udiv(k, I64(BLOCK)), I64(PANEL_ROWS)))
                planes_at, own_first = builder.mul(own, I64(NUM_PLANES)), builder.add(own, first_output)
                bytes_at = builder.mul(own_first, I64(BLOCK))
                for n in range(num_outputs):
                    prefetch_line(builder, builder.gep(bytes_data, [builder.add(bytes_at, I64(_AHEAD + n * BLOCK))]))
                for line in range(0, PANEL_ROWS * NUM_PLANES, _LINE_PLANES):
                    prefetch_line(builder, builder.gep(planes_data, [builder.add(planes_at, I64(_AHEAD_PLANES + line))]))
                prefetch_line(builder, builder.gep(escapes_data, [builder.add(builder.load(place), I64(_AHEAD_ESCAPES))]))
                inputs = [load_inputs(r, k, some) for r in range(num_rows)] if num_outputs == PANEL_ROWS else []
                before, behind = count_others(own)
                begin = builder.add(builder.load(place), before)
                decoded = []
                for n in range(num_outputs):
                    planes = planes_of(builder.add(own_first, I64(n)))
                    own_bytes = _load(builder, bytes_data, builder.add(bytes_at, I64(n * BLOCK)), _BYTES)
                    weights, escaped = _decoded(builder, own_bytes, planes, base_lanes[n], escapes_data, begin)
                    begin = builder.add(begin, _call(builder, "llvm.ctpop.i64", I64, [escaped]))
                    decoded.append([builder.bitcast(part, PAIRS) for part in weights])
                    if inputs:
                        multiply(n, decoded[n], inputs)
                builder.store(builder.add(begin, behind), place)
                if not inputs:  # registers hold the weights, and each row's inputs in turn
                    for r in range(num_rows):
                        loaded = load_inputs(r, k, some)
                        for n in range(num_outputs):
                            multiply(n, decoded[n], [loaded], r)

            def multiply(n: int, weights: list[Any], inputs: list[Any], first_row: int = 0) -> None:
                for half, part in enumerate(weights):
                    for r, own_inputs in enumerate(inputs, first_row):
                        total = totals[r * num_outputs + n]
                        builder.store(add_products(builder, builder.load(total), own_inputs[half], part, True), total)

            whole = builder.and_(row_width, I64(-BLOCK))
            with cgutils.for_range_slice(builder, I64(0), whole, I64(BLOCK)) as (k, _):
                add(k)
            with builder.if_then(builder.icmp_signed("<", whole, row_width), likely=False):
                add(whole, builder.trunc(builder.sub(row_width, whole), I32))
            sums = fold(builder, [builder.load(total) for total in totals])
            part = shuffle(builder, sums, sums, list(range(num_rows * num_outputs)))
            builder.store(part, builder.bitcast(out, part.type.as_pointer()), align=4)
            return context.get_dummy_value()

        one = types.int64
        return types.void(x, one, one, body, codes, bases, one, one, escapes, one, one, folded), generate

    return tile


def outputs_of(num_rows: int) -> int:
    """Returns how many outputs a tile of num_rows rows (MOST_TILE_ROWS at most) multiplies: all of a panel, or half of them if the
    sums of all would not fit into registers. (Tiles of 16 rows and one output were measured to be slower than two tiles of 8 rows,
    because x is read once for each output.)"""
    return PANEL_ROWS if num_rows <= PANEL_ROWS else PANEL_ROWS // 2
