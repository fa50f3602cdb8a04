"""Scalar pieces of the Numba kernels: bfloat16 as uint16 bits, and an exponential that LLVM can vectorise.

`widen` and `narrow` turn an element (float32, or bfloat16 bits as uint16) into float32 and back, so each kernel is written once.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int32, njit, types, uint32
from numba.core import cgutils
from numba.extending import intrinsic

# Sums may be reordered, but NaN and infinity keep their meaning: rows with such logits are found, not hidden.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


def named(name: str, function: Any) -> Any:
    """A copy of a Python function under another name. Numba's cache tells kernels apart by name, not by options, so that of two
    compilations of one function the second would be given what the first left there."""
    copy = FunctionType(function.__code__, function.__globals__, name)
    copy.__qualname__ = name
    return copy


@intrinsic
def widen(typing_context: Any, value: Any) -> Any:
    """float32 of an element; exact."""

    def identity(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    def shift(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), identity if value == types.float32 else shift


@intrinsic
def narrow(typing_context: Any, value: Any, like: Any) -> Any:
    """value (float32) as an element of `like`'s type; bfloat16 rounds to nearest even, NaN stays NaN."""

    def identity(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    def round_to_even(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        bits = builder.bitcast(args[0], i32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(i32, 16)), ir.Constant(i32, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(i32, 0x7FFF))), ir.Constant(i32, 16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(is_nan, ir.Constant(i32, 0x7FC0), rounded), ir.IntType(16))

    return like(types.float32, like), identity if like == types.float32 else round_to_even


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Has the cache line of array[index] fetched while other work goes on. The index may be any number: nothing is read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [address, ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)])  # read, keep, data
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """int32 bits as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(typing_context: Any, value: Any) -> Any:
    """float32 as int32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@njit(inline="always", fastmath=FASTMATH)
def exp(x: float) -> float:
    """e**x in float32, relative error below 3e-7; 0 below -87, clamped above 88.

    2**n * 2**f with f in [-0.5, 0.5] and the Taylor series of 2**f to the 7th power.
    """
    clamped = max(float32(-87.0), min(float32(88.0), x))
    scaled = clamped * float32(1.4426950408889634)
    # not the usual trick of adding and taking away 1.5 * 2**23: sums that may be reordered cancel out
    whole = float32(np.floor(scaled + float32(0.5)))
    f = (clamped - whole * float32(0.693359375)) - whole * float32(-2.12194440e-4)
    p = float32(1.9875691500e-4)
    p = p * f + float32(1.3981999507e-3)
    p = p * f + float32(8.3334519073e-3)
    p = p * f + float32(4.1665795894e-2)
    p = p * f + float32(1.6666665459e-1)
    p = p * f + float32(5.0000001201e-1)
    p = p * f * f + f + float32(1.0)
    power = float_of_bits((int32(whole) + int32(127)) << int32(23))
    return p * power


@njit(inline="always")
def hash32(index: int, key0: int, key1: int) -> int:
    """32 well mixed bits of (index, key0, key1), all uint32: two rounds of a multiply-xorshift finaliser."""
    h = uint32(uint32(index) * uint32(0x9E3779B1)) ^ key0
    h = uint32((h ^ (h >> uint32(16))) * uint32(0x85EBCA6B))
    h = uint32((h ^ (h >> uint32(13))) * uint32(0xC2B2AE35))
    h = uint32(uint32(h ^ (h >> uint32(16))) + key1)
    h = uint32((h ^ (h >> uint32(15))) * uint32(0x2C1B3C6D))
    h = uint32((h ^ (h >> uint32(12))) * uint32(0x297A2D39))
    return uint32(h ^ (h >> uint32(15)))


@njit(inline="always", fastmath=FASTMATH)
def uniform(bits: int) -> float:
    """(bits + 1/2) / 2**32 in float32, of uint32: never 0, and 1 at most."""
    return (float32(bits) + float32(0.5)) * float32(2.3283064365386963e-10)


@njit(inline="always", fastmath=FASTMATH)
def exponential(bits: int) -> float:
    """-log(1 - (bits + 1/2) / 2**32) in float32: 32 uniform bits (uint32) as a draw from the unit exponential distribution.

    Never 0: a token with a draw of 0 would win whatever its weight, once in 2**32 / V tokens.

    Small draws decide races, so they keep their relative precision: a series below 1/64, else the logarithm of (1 - u).
    """
    u = uniform(bits)
    series = u * (float32(1.0) + u * (float32(0.5) + u * (float32(0.33333334) + u * float32(0.25))))
    rest = max(float32(1.0) - u, float32(2.9802322e-8))
    # rest = 2**e * m with m in [sqrt(1/2), sqrt(2)); log m by Cephes' polynomial
    pattern = bits_of_float(rest) - int32(0x3F3504F3)
    e = float32(pattern >> int32(23))
    m = float_of_bits((pattern & int32(0x007FFFFF)) + int32(0x3F3504F3)) - float32(1.0)
    p = float32(7.0376836292e-2)
    p = p * m + float32(-1.1514610310e-1)
    p = p * m + float32(1.1676998740e-1)
    p = p * m + float32(-1.2420140846e-1)
    p = p * m + float32(1.4249322787e-1)
    p = p * m + float32(-1.6668057665e-1)
    p = p * m + float32(2.0000714765e-1)
    p = p * m + float32(-2.4999993993e-1)
    p = p * m + float32(3.3333331174e-1)
    log_m = m + m * m * (m * p - float32(0.5))
    return series if u < float32(0.015625) else -(log_m + e * float32(0.6931471805599453))
