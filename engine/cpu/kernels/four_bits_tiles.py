"""Generates the inner loops of products with weights of four bits, which are widened in registers, and of widening whole matrices.

The element type of the array of scales tells the format: uint8 for MXFP4 (loader/formats/mxfp4.py), 16 bits for INT4
(loader/formats/int4_layout.py), int8 (codes of e4m3) for NVFP4 (loader/formats/stored_nvfp4.py). The array of zero points is uint8
if the format is INT4 with zero points, float32 with each output's own factor for NVFP4, and otherwise int8 and not read.

A group of 32 weights is 16 bytes: weights of even index are in the low halves of the bytes, those of odd index in the high halves.
NVFP4 has a scale for each 16 weights, so a group has two scales; the first belongs to the first 8 bytes.

Half a byte is turned into its number by a table of 16 float32 or 32 bfloat16 with AVX-512 (for INT4 one table for each zero point).
On other processors INT4 takes a subtraction; MXFP4 and NVFP4 take a table of 16 bytes with AVX2 and NEON, else comparisons. The
tables of MXFP4 and NVFP4 hold twice each number, which is a whole number; to make up for it, the factors made of their scales are
halved.

The dot product of a group is multiplied with the factor of its scale, in NVFP4 each half with its own factor. MXFP4's scales are
powers of two: on processors that multiply bfloat16 they are added to the exponents in the group's table instead, once for all rows.

The loops are generated as LLVM code because Numba's vectoriser does not keep a tile's sums in registers (see vectors.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.bits import HAS_BFLOAT16_PRODUCTS, narrow_bits, prefetch_line
from engine.cpu.kernels.vectors import FLOAT, I32, I64, LANES, PAIRS, SUMS, add_products, fma, fold, shuffle, splat, vector
from engine.host import processor

GROUP, GROUP_BYTES = 32, 16
OUTPUTS = 4  # of a tile
_HAS_WIDE_TABLES = processor.runs("wide_tables")
ROWS = 4 if _HAS_WIDE_TABLES else 1  # of a tile: sums of 4 rows take 16 registers of 512 bits
_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the numbers that three bits stand for; the fourth is the sign
_DOUBLED = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_INT4 = tuple(range(-8, 8))
_ONE_SCALE, _LEAST_SCALE, _MOST_SCALE = 127, 2, 252  # scales of MXFP4: of the factor 1, and those that write_exponents takes as is
_MOST_ZERO = 16  # GPTQ stores zero points as a number that is one less
_BYTE = ir.IntType(8)
_BYTES, _WORDS = ir.VectorType(_BYTE, LANES), ir.VectorType(ir.IntType(16), 2 * LANES)


def _bfloat16_bits(value: float) -> int:
    """Returns the bfloat16 bits of a whole number whose magnitude is below 256."""
    if value == 0:
        return 0
    exponent = abs(int(value)).bit_length() - 1
    return (0x8000 if value < 0 else 0) | (127 + exponent) << 7 | (abs(int(value)) << 7 >> exponent) & 0x7F


def _pointer(builder: ir.IRBuilder, data: Any, at: Any, kind: ir.Type) -> Any:
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


def _load_bytes(builder: ir.IRBuilder, data: Any, at: Any) -> Any:
    return builder.load(_pointer(builder, data, at, _BYTES), align=1)


def _is_int4(scales: types.Array) -> bool:
    return bool(scales.dtype == types.uint16)


def is_nvfp4(scales: types.Array) -> bool:
    return bool(scales.dtype == types.int8)


def _has_zeros(zeros: types.Array) -> bool:
    return bool(zeros.dtype == types.uint8)


def _tables(builder: ir.IRBuilder, paired: bool) -> Any:
    """Emits INT4's tables as a global constant and returns a pointer to them: for each zero point from 0 to 16 the numbers of the
    16 codes, as 32 bfloat16 (the numbers twice) if paired, else as 16 float32."""
    numbers = [[code - zero for code in range(16)] for zero in range(_MOST_ZERO + 1)]
    if paired:
        tables = [ir.Constant(_WORDS, [_bfloat16_bits(value) for value in table * 2]) for table in numbers]
    else:
        tables = [ir.Constant(SUMS, [float(value) for value in table]) for table in numbers]
    whole = ir.ArrayType(tables[0].type, len(tables))
    return cgutils.global_constant(builder, "int4_numbers", ir.Constant(whole, tables))


def _table(builder: ir.IRBuilder, tables: Any, zero: Any) -> Any:
    at = builder.gep(tables, [I64(0), builder.zext(zero, I64)], inbounds=True)
    return builder.load(at, align=4)


def _load_zero(builder: ir.IRBuilder, zeros: Any, at: Any) -> Any:
    """Emits the load of the zero point at index `at` of zeros, and returns it as a byte."""
    return builder.load(builder.gep(zeros, [at]))


def _pairs(builder: ir.IRBuilder, packed: Any, is_int4: bool, tables: Any, zero: Any, exponents: Any = None) -> Any:
    """Returns the numbers of the 32 codes in 16 bytes (packed) as 16 pairs of bfloat16; for MXFP4 and NVFP4 twice the numbers.
    tables, zero: the result of _tables and the zero point; None if there are no zero points. exponents: the word that
    write_exponents wrote for the group (only MXFP4), by which the numbers are multiplied; None: they are not multiplied."""
    words = builder.zext(packed, PAIRS)
    index = builder.bitcast(builder.or_(words, builder.shl(words, vector(PAIRS, 12))), _WORDS)
    # of an index the lowest five bits count, of which the fifth is another number's
    table = ir.Constant(_WORDS, [_bfloat16_bits(value) for value in (_INT4 if is_int4 else _DOUBLED) * 2])
    if zero is not None:
        table = _table(builder, tables, zero)
    if exponents is not None:
        moved = builder.add(table, builder.bitcast(splat(builder, exponents, PAIRS), _WORDS))
        has_value = ir.Constant(ir.VectorType(ir.IntType(1), 2 * LANES), [value != 0 for value in _DOUBLED * 2])
        table = builder.select(has_value, moved, vector(_WORDS, 0))
    kind = ir.FunctionType(_WORDS, [_WORDS, _WORDS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
    return builder.bitcast(builder.call(function, [table, index]), PAIRS)


def _floats(builder: ir.IRBuilder, packed: Any, is_int4: bool, tables: Any, zero: Any) -> tuple[Any, Any]:
    """Returns the numbers of the 32 codes in 16 bytes (packed) as two vectors of float32, first those of even index, then those of
    odd index; for MXFP4 and NVFP4 twice the numbers. tables, zero: the result of _tables and the zero point; None if there are no
    zero points. tables is also None without AVX-512."""
    if _HAS_WIDE_TABLES:
        table = ir.Constant(SUMS, [float(value) for value in (_INT4 if is_int4 else _DOUBLED)])
        if zero is not None:
            table = _table(builder, tables, zero)
        kind = ir.FunctionType(SUMS, [SUMS, PAIRS])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
        words = builder.zext(packed, PAIRS)  # of an index the lowest four bits count
        return builder.call(function, [table, words]), builder.call(function, [table, builder.lshr(words, vector(PAIRS, 4))])
    low, high = builder.and_(packed, vector(_BYTES, 15)), builder.lshr(packed, vector(_BYTES, 4))
    if is_int4:
        zeros = vector(_BYTES, 8) if zero is None else splat(builder, zero, _BYTES)
        whole = [builder.sub(half, zeros) for half in (low, high)]
    else:
        whole = [_doubled_bytes(builder, half) for half in (low, high)]
    even, odd = (builder.sitofp(numbers, SUMS) for numbers in whole)
    return even, odd


def _doubled_bytes(builder: ir.IRBuilder, index: Any) -> Any:
    """Returns twice the numbers of 16 four-bit codes of MXFP4 and NVFP4, as signed bytes. index: the codes, one in each of 16
    bytes."""
    table = ir.Constant(_BYTES, list(_DOUBLED))
    kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
    for kernel, name in (
        ("byte_tables", "llvm.x86.ssse3.pshuf.b.128"),
        ("neon_tables", "llvm.aarch64.neon.tbl1.v16i8"),
    ):
        if processor.runs(kernel):
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [table, index])
    low = builder.and_(index, vector(_BYTES, 7))
    digit = builder.or_(builder.and_(index, vector(_BYTES, 1)), vector(_BYTES, 2))
    above = builder.select(
        builder.icmp_unsigned("<", low, vector(_BYTES, 6)),
        builder.shl(digit, vector(_BYTES, 1)),
        builder.shl(digit, vector(_BYTES, 2)),
    )
    value = builder.select(builder.icmp_unsigned("<", low, vector(_BYTES, 4)), low, above)
    return builder.select(builder.icmp_unsigned("<", index, vector(_BYTES, 8)), value, builder.sub(vector(_BYTES, 0), value))


def _halved_powers(builder: ir.IRBuilder, words: Any, floats: ir.VectorType) -> Any:
    """Returns the factors of MXFP4's scales, halved: half of 2**(word - 127), for words from 0 to 254, as a vector of type
    floats."""
    bits = builder.shl(words, vector(words.type, 23))
    # 2**-127 has no exponent of its own
    bits = builder.select(builder.icmp_unsigned("==", bits, vector(words.type, 0)), vector(words.type, 0x00400000), bits)
    return builder.fmul(builder.bitcast(bits, floats), vector(floats, 0.5))


def _halved_codes(builder: ir.IRBuilder, words: Any, floats: ir.VectorType) -> Any:
    """Returns the factors of NVFP4's scales, halved: half of the numbers whose e4m3 codes the words are, as a vector of type
    floats. NaN is not allowed."""
    # the bias of float32's exponent is 120 more; numbers without a leading one follow the same rule
    size = builder.bitcast(builder.shl(builder.and_(words, vector(words.type, 0x7F)), vector(words.type, 20)), floats)
    sign = builder.shl(builder.and_(words, vector(words.type, 0x80)), vector(words.type, 24))
    bits = builder.or_(builder.bitcast(builder.fmul(size, vector(floats, 2.0**119)), words.type), sign)
    return builder.bitcast(bits, floats)


def _short_floats(builder: ir.IRBuilder, words: Any, halves: Any, floats: ir.VectorType) -> Any:
    """Returns numbers of 16 bits as float32. words: the bits of one number in each word. halves (i1): the numbers are float16, else
    bfloat16. NaN and infinity are not allowed."""
    longer = builder.bitcast(builder.shl(words, vector(words.type, 16)), floats)
    # the bias of float32's exponent is 112 more; numbers without a leading one follow the same rule
    size = builder.bitcast(builder.shl(builder.and_(words, vector(words.type, 0x7FFF)), vector(words.type, 13)), floats)
    sign = builder.shl(builder.and_(words, vector(words.type, 0x8000)), vector(words.type, 16))
    bits = builder.or_(builder.bitcast(builder.fmul(size, vector(floats, 2.0**112)), words.type), sign)
    return builder.select(halves, builder.bitcast(bits, floats), longer)


def _group_factors(builder: ir.IRBuilder, factors: Any, at: Any, scales: types.Array) -> Any:
    """Returns 16 lanes, by which the products of a group are multiplied. All lanes hold the factor at index `at`; for NVFP4 the
    first 8 lanes hold this factor and the other 8 the next one."""
    if not is_nvfp4(scales):
        return splat(builder, builder.load(builder.gep(factors, [at])), SUMS)
    both = builder.load(_pointer(builder, factors, at, ir.VectorType(FLOAT, 2)), align=4)
    return shuffle(builder, both, both, [lane // (LANES // 2) for lane in range(LANES)])


def _for_lanes(builder: ir.IRBuilder, num: Any, write: Callable[[Any, int], None]) -> None:
    """Emits loops that run write(k, lanes) for all numbers k from 0 to below num: in steps of LANES numbers (lanes = LANES), then
    one by one for the remaining numbers (lanes = 1)."""
    whole = builder.sub(num, builder.urem(num, I64(LANES)))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES)) as (k, _):
        write(k, LANES)
    with cgutils.for_range_slice(builder, whole, num, I64(1)) as (k, _):
        write(k, 1)


@intrinsic
def write_factors(typing_context: Any, scales: Any, at: Any, count: Any, halves: Any, factors: Any, to: Any) -> Any:
    """Writes the factors (float32) of `count` scales, from index `at` on, to factors from index `to` on. A factor is the scale
    itself for INT4, and half of it for MXFP4 and NVFP4; for NVFP4 the caller must still multiply it by the output's own factor.
    halves: scales of 16 bits are float16, else bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 4))
        _, begin, num, are_halves, _, to_begin = args
        is_int4 = _is_int4(scales)

        def write(k: Any, lanes: int) -> None:
            raw = ir.VectorType(ir.IntType(16) if is_int4 else _BYTE, lanes)
            some = builder.load(_pointer(builder, source, builder.add(begin, k), raw), align=2 if is_int4 else 1)
            words, floats = builder.zext(some, ir.VectorType(I32, lanes)), ir.VectorType(FLOAT, lanes)
            if is_int4:
                made = _short_floats(builder, words, are_halves, floats)
            else:
                made = (_halved_codes if is_nvfp4(scales) else _halved_powers)(builder, words, floats)
            builder.store(made, _pointer(builder, target, builder.add(to_begin, k), floats), align=4)

        _for_lanes(builder, num, write)
        return context.get_dummy_value()

    one = types.int64
    return types.void(scales, one, one, types.boolean, factors, one), generate


@intrinsic
def write_exponents(typing_context: Any, scales: Any, at: Any, count: Any, factors: Any) -> Any:
    """Writes one word for each of `count` scales (uint8), from index `at` on, to the beginning of `factors` (float32). For MXFP4
    with bfloat16 rows, four_bits_tile takes these words in place of factors. Added to the bits of two bfloat16, a word multiplies
    both numbers by half of the scale. Scales are clamped to between 2**-125 and 2**125, so that no bfloat16 number's exponent
    overflows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 3))
        _, begin, num, _ = args

        def write(k: Any, lanes: int) -> None:
            codes, words = ir.VectorType(_BYTE, lanes), ir.VectorType(I32, lanes)
            some = builder.zext(builder.load(_pointer(builder, source, builder.add(begin, k), codes), align=1), words)
            least, most = vector(words, _LEAST_SCALE), vector(words, _MOST_SCALE)
            some = builder.select(builder.icmp_unsigned("<", some, least), least, some)
            some = builder.select(builder.icmp_unsigned(">", some, most), most, some)
            moved = builder.shl(builder.sub(some, vector(words, _ONE_SCALE + 1)), vector(words, 7))
            both = builder.or_(builder.and_(moved, vector(words, 0xFFFF)), builder.shl(moved, vector(words, 16)))
            builder.store(both, _pointer(builder, target, k, words), align=4)

        _for_lanes(builder, num, write)
        return context.get_dummy_value()

    return types.void(scales, types.int64, types.int64, factors), generate


def moves_exponents(element: types.Type, scales: types.Array) -> bool:
    """Returns whether four_bits_tile takes the words of write_exponents in place of factors: for MXFP4 scales, and rows of this
    element type if takes_pairs returns True for it."""
    return takes_pairs(element) and bool(scales.dtype == types.uint8)


def four_bits_tile(num_rows: int) -> Any:
    """Returns a function (x, x_at, blocks, blocks_at, scales, zeros, zeros_at, factors, num_factors, shift, num_groups, ahead,
    folded) for kernels. It multiplies num_rows rows with the weights of OUTPUTS outputs, and writes the result of row r and output
    n, float32, to folded[r * OUTPUTS + n].

    x: the rows lie end to end from index x_at on, num_groups * 32 elements each: bfloat16 bits, or float32 in the order of
    spread_group.
    blocks: the weights' bytes, those of all outputs end to end from index blocks_at on.
    scales: not read; its element type tells the weights' format.
    factors: [OUTPUTS, num_factors]. Group g of 32 weights has the factor with index g >> shift of its output; for NVFP4 it has two,
    2 g and 2 g + 1. If moves_exponents returns True, these are the words of write_exponents.
    zeros: the zero points, in the same order, from index zeros_at on.
    ahead: the bytes at this distance after the weights, as many as the weights take, are prefetched meanwhile."""

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        x_at: Any,
        blocks: Any,
        blocks_at: Any,
        scales: Any,
        zeros: Any,
        zeros_at: Any,
        factors: Any,
        num_factors: Any,
        shift: Any,
        num_groups: Any,
        ahead: Any,
        folded: Any,
    ) -> Any:
        paired, is_int4, has_zeros = x.dtype == types.uint16, _is_int4(scales), _has_zeros(zeros)
        moved = moves_exponents(x.dtype, scales)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rows, weights, zero_points, factors_data, out = (
                context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 2, 5, 7, 12)
            )
            _, x_begin, _, begin, _, _, zeros_begin, _, per_output, shift_by, count, ahead_by, _ = args
            tables = _tables(builder, paired) if has_zeros and _HAS_WIDE_TABLES else None
            row_width, output_bytes = builder.mul(count, I64(GROUP)), builder.mul(count, I64(GROUP_BYTES))
            totals = [cgutils.alloca_once_value(builder, vector(SUMS, 0.0)) for _ in range(num_rows * OUTPUTS)]
            for total in totals:
                builder.store(vector(SUMS, 0.0), total)
            with cgutils.for_range_slice(builder, I64(0), count, I64(1)) as (group, _):
                line = builder.add(builder.add(begin, ahead_by), builder.mul(group, I64(OUTPUTS * GROUP_BYTES)))
                prefetch_line(builder, builder.gep(weights, [line]), 3)
                inputs: list[Any] = []
                for r in range(num_rows):
                    at = builder.add(builder.add(x_begin, builder.mul(row_width, I64(r))), builder.mul(group, I64(GROUP)))
                    if paired:
                        inputs.append([builder.load(_pointer(builder, rows, at, PAIRS), align=2)])
                    else:
                        parts = (at, builder.add(at, I64(LANES)))
                        inputs.append([builder.load(_pointer(builder, rows, part, SUMS), align=4) for part in parts])
                number = builder.shl(group, I64(1)) if is_nvfp4(scales) else builder.lshr(group, shift_by)
                for n in range(OUTPUTS):
                    place = builder.add(builder.add(begin, builder.mul(output_bytes, I64(n))), builder.mul(group, I64(GROUP_BYTES)))
                    packed = _load_bytes(builder, weights, place)
                    of_group, zero = builder.add(builder.mul(per_output, I64(n)), number), None
                    if has_zeros:
                        zero = _load_zero(builder, zero_points, builder.add(zeros_begin, of_group))
                    numbers = (builder, packed, is_int4, tables, zero)
                    if moved:
                        exponents = builder.load(_pointer(builder, factors_data, of_group, I32), align=4)
                        columns: Sequence[Any] = [_pairs(*numbers, exponents)]
                    else:
                        columns = [_pairs(*numbers)] if paired else _floats(*numbers)
                        factor = _group_factors(builder, factors_data, of_group, scales)
                    for r, parts in enumerate(inputs):
                        total = totals[r * OUTPUTS + n]
                        if moved:
                            builder.store(add_products(builder, builder.load(total), parts[0], columns[0], True), total)
                            continue
                        if paired:
                            product = add_products(builder, vector(SUMS, 0.0), parts[0], columns[0], True)
                        else:
                            product = fma(builder, parts[1], columns[1], builder.fmul(parts[0], columns[0]))
                        builder.store(fma(builder, product, factor, builder.load(total)), total)
            sums = fold(builder, [builder.load(total) for total in totals])
            part = shuffle(builder, sums, sums, list(range(num_rows * OUTPUTS)))
            builder.store(part, builder.bitcast(out, part.type.as_pointer()), align=4)
            return context.get_dummy_value()

        one = types.int64
        return types.void(x, one, blocks, one, scales, zeros, one, factors, *(one,) * 4, folded), generate

    return tile


@intrinsic
def spread_group(typing_context: Any, x: Any, at: Any, to: Any, to_at: Any) -> Any:
    """Writes 32 elements of x (float32, or bfloat16 bits) from index `at` on to `to` as float32, from index to_at on: those of even
    index, then those of odd index."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 2))
        _, begin, _, to_begin = args
        if x.dtype == types.uint16:
            pairs = builder.load(_pointer(builder, source, begin, PAIRS), align=2)
            even, odd = builder.shl(pairs, vector(PAIRS, 16)), builder.and_(pairs, vector(PAIRS, 0xFFFF0000))
            parts = [builder.bitcast(even, SUMS), builder.bitcast(odd, SUMS)]
        else:
            places = (begin, builder.add(begin, I64(LANES)))
            left, right = (builder.load(_pointer(builder, source, place, SUMS), align=4) for place in places)
            parts = [shuffle(builder, left, right, list(range(first, 2 * LANES, 2))) for first in (0, 1)]
        for half, part in enumerate(parts):
            builder.store(part, _pointer(builder, target, builder.add(to_begin, I64(half * LANES)), SUMS), align=4)
        return context.get_dummy_value()

    return types.void(x, types.int64, to, types.int64), generate


@intrinsic
def widen_group(
    typing_context: Any,
    blocks: Any,
    at: Any,
    scales: Any,
    zeros: Any,
    zero_at: Any,
    factors: Any,
    factor_at: Any,
    out: Any,
    to: Any,
) -> Any:
    """Writes the 32 weights of a group, whose 16 bytes begin at index `at` of blocks, to out (float32, or bfloat16 bits) from index
    `to` on. scales: not read; its element type tells the weights' format. zeros, zero_at: the zero points, and the index of the
    group's zero point. factor_at: the index in factors of the group's factor, or for NVFP4 of the first of its two factors."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, zero_points, made, target = (
            context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 3, 5, 7)
        )
        _, begin, _, _, own_zero_at, _, first_factor, _, to_begin = args
        is_int4, of_group = _is_int4(scales), _group_factors(builder, made, first_factor, scales)
        tables = zero = None
        if _has_zeros(zeros):
            zero = _load_zero(builder, zero_points, own_zero_at)
            tables = _tables(builder, False) if _HAS_WIDE_TABLES else None
        numbers = _floats(builder, _load_bytes(builder, source, begin), is_int4, tables, zero)
        even, odd = (builder.fmul(part, of_group) for part in numbers)
        if out.dtype == types.uint16:
            rounds = is_int4 or is_nvfp4(scales)
            builder.store(_alternating(builder, even, odd, rounds), _pointer(builder, target, to_begin, PAIRS), align=2)
            return context.get_dummy_value()
        for part in range(2):
            lanes = [lane // 2 + lane % 2 * LANES for lane in range(part * LANES, (part + 1) * LANES)]
            place = _pointer(builder, target, builder.add(to_begin, I64(part * LANES)), SUMS)
            builder.store(shuffle(builder, even, odd, lanes), place, align=4)
        return context.get_dummy_value()

    one = types.int64
    return types.void(blocks, one, scales, zeros, one, factors, one, out, one), generate


def _alternating(builder: ir.IRBuilder, even: Any, odd: Any, rounds: bool) -> Any:
    """Returns one vector of 16 bfloat16 pairs, in the order of the index, from two vectors of float32: the numbers of even and of
    odd index. rounds: whether to round the numbers to bfloat16; False: bfloat16 represents all of them exactly."""
    if rounds:
        low, high = (builder.zext(narrow_bits(builder, part), PAIRS) for part in (even, odd))
        return builder.or_(low, builder.shl(high, vector(PAIRS, 16)))
    # numbers of MXFP4 have few digits, so the lower half of their bits is 0
    low = builder.lshr(builder.bitcast(even, PAIRS), vector(PAIRS, 16))
    return builder.or_(low, builder.bitcast(odd, PAIRS))


def takes_pairs(element: types.Type) -> bool:
    """Returns whether four_bits_tile takes rows of this element type unchanged: they are bfloat16 and the processor multiplies
    bfloat16. Other rows must be copied by spread_group first."""
    return HAS_BFLOAT16_PRODUCTS and element == types.uint16
