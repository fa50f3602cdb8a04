"""Converts FP8 codes (float8_e4m3fn) in LLVM vectors to bfloat16 or float32. The results are exact, but FACTOR times smaller than
the numbers that the codes stand for, because the biases of the exponents differ; callers multiply with FACTOR together with a
scale.

A shift moves a code's exponent and mantissa to their places in the wider type. Numbers below 2**-6 (exponent 0) have no leading one
and need more: in bfloat16 the bits are looked up in a table; in float32 the leading one is subtracted again, or the codes are
converted by way of float16, whose small numbers follow the same rule."""

from __future__ import annotations

import struct
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.bits import narrow_bits
from engine.cpu.kernels.vectors import FLOAT, LANES, PAIRS, SUMS, Loader, for_pieces, splat, vector
from engine.host import processor

FACTOR = 256.0
_HAS_HALVES = processor.runs("half_conversion")
_BYTES, _SHORTS = ir.VectorType(ir.IntType(8), 2 * LANES), ir.VectorType(ir.IntType(16), 2 * LANES)
_HALF_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_BIAS = 127 - 7 - 8  # added to a code's exponent: float32's and bfloat16's bias for e4m3's, and 1 / FACTOR


def _bfloat16_bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little") >> 16


# What is added to a mantissa at its place in bfloat16, for an exponent of 0: 0, and for 1 to 7 what makes the bits of m * 2**-17.
_SMALL = [_bfloat16_bits(m * 2.0**-9 / FACTOR) - (m << 4) for m in range(8)] + [0] * 24


def codes_as_pairs(builder: ir.IRBuilder, codes: Any) -> Any:
    """Returns the numbers of 32 codes, divided by FACTOR, as 16 pairs of bfloat16. Only for processors that multiply pairs of
    bfloat16; these have AVX-512."""
    wide = builder.sext(codes, _SHORTS)
    bits = builder.and_(builder.shl(wide, vector(_SHORTS, 4)), vector(_SHORTS, 0x87F0))
    is_small = builder.icmp_signed("==", builder.and_(wide, vector(_SHORTS, 0x78)), vector(_SHORTS, 0))
    kind = ir.FunctionType(_SHORTS, [_SHORTS, _SHORTS])
    permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
    looked_up = builder.call(permute, [ir.Constant(_SHORTS, _SMALL), wide])
    return builder.bitcast(builder.add(bits, builder.select(is_small, looked_up, vector(_SHORTS, _BIAS << 7))), PAIRS)


def codes_as_floats(builder: ir.IRBuilder, codes: Any) -> Any:
    """Returns the numbers of 16 codes, divided by FACTOR, as float32."""
    if _HAS_HALVES:
        wide = builder.sext(codes, _HALF_SHORTS)
        bits = builder.and_(builder.shl(wide, vector(_HALF_SHORTS, 7)), vector(_HALF_SHORTS, 0xBF80))
        return builder.fpext(builder.bitcast(bits, _HALVES), SUMS)
    wide = builder.sext(codes, PAIRS)
    size = builder.and_(builder.shl(wide, vector(PAIRS, 20)), vector(PAIRS, 0x07F00000))
    is_small = builder.icmp_unsigned("<", size, vector(PAIRS, 1 << 23))
    one = builder.select(is_small, vector(SUMS, 2.0**-6 / FACTOR), vector(SUMS, 0.0))
    bias = builder.select(is_small, vector(PAIRS, (_BIAS + 1) << 23), vector(PAIRS, _BIAS << 23))
    number = builder.fsub(builder.bitcast(builder.add(size, bias), SUMS), one)
    sign = builder.and_(wide, vector(PAIRS, 0x80000000))
    return builder.bitcast(builder.or_(builder.bitcast(number, PAIRS), sign), SUMS)


class CodeLoader(Loader):
    """Emits loads of FP8 codes, as numbers divided by FACTOR: 32 codes as bfloat16 pairs if paired, else 16 codes as float32. It is
    called with an index and a count, like its base class, which loads the other operand of the product in the same form."""

    def __init__(self, builder: ir.IRBuilder, data: Any, paired: bool) -> None:
        super().__init__(builder, data, types.uint8, paired)

    def __call__(self, at: Any, count: Any = None) -> Any:
        codes = self.raw(at, count)
        return codes_as_pairs(self._builder, codes) if self._paired else codes_as_floats(self._builder, codes)


def code_loader(builder: ir.IRBuilder, data: Any, codes: Any, paired: bool) -> Loader:
    """Returns an object that emits the loads of an array of codes, whose elements are FP8 codes (uint8) or int8 numbers. codes:
    Numba's type of the array. The loaded numbers are code_factor times too small."""
    return CodeLoader(builder, data, paired) if codes.dtype == types.uint8 else Loader(builder, data, types.int8, paired)


def _factor_of(codes: Any) -> float:
    return FACTOR if codes.dtype == types.uint8 else 1.0


@intrinsic
def code_factor(typing_context: Any, codes: Any) -> Any:
    """Returns the factor (float32) by which the loaded numbers of an array of codes are too small."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(FLOAT, _factor_of(codes))

    return types.float32(codes), generate


@intrinsic
def widen_codes(typing_context: Any, codes: Any, at: Any, count: Any, factor: Any, out: Any, out_at: Any) -> Any:
    """Writes the numbers of `count` codes (FP8 as uint8, or int8 numbers), from index `at` on, times `factor` (float32), to out
    (float32, or bfloat16 bits) from index out_at on. They are computed in float32 and rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(signature.args[0])(context, builder, args[0]).data
        target = context.make_array(signature.args[4])(context, builder, args[4]).data
        _, begin, length, scale, _, to = args
        load = code_loader(builder, source, codes, False)
        factors = splat(builder, builder.fmul(scale, ir.Constant(FLOAT, _factor_of(codes))), SUMS)

        def write(k: Any, some: Any = None) -> None:
            values = builder.fmul(load(builder.add(begin, k), some), factors)
            if out.dtype != types.float32:
                values = narrow_bits(builder, values)
            place = builder.gep(target, [builder.add(to, k)])
            address = builder.bitcast(place, values.type.as_pointer())
            align = out.dtype.bitwidth // 8
            if some is None:
                builder.store(values, address, align=align)
                return
            places = ir.Constant(PAIRS, list(range(LANES)))
            mask = builder.icmp_signed("<", places, splat(builder, some, PAIRS))
            letter = "f" if out.dtype == types.float32 else "i"
            kind = ir.FunctionType(ir.VoidType(), [values.type, address.type, mask.type])
            name = f"llvm.masked.store.v{LANES}{letter}{out.dtype.bitwidth}.p0"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [values, address, mask])

        for_pieces(builder, length, LANES, write)
        return context.get_dummy_value()

    sizes = types.int64
    return types.void(codes, sizes, sizes, types.float32, out, sizes), generate
