"""Provides scalar functions to the Numba kernels: bfloat16 as uint16 bits, and an exponential function that LLVM can vectorise.

`widen` and `narrow` convert an element (float32, or bfloat16 bits as uint16) to float32 and back, so each kernel is written once.

Bit operations are generated in the width of their arguments. Numba's own integers become 64 bits wide with the first operation, and
then a loop handles only half or a quarter as many elements at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

from llvmlite import ir
from numba import float32, int32, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.host import processor

# Sums may be reordered, but NaN and infinity keep their meaning, so that rows with such logits are found.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
HAS_BFLOAT16_PRODUCTS = processor.runs("bfloat16_pairs")  # the same instructions also convert to bfloat16
_I32, _BYTES = ir.IntType(32), ir.IntType(8).as_pointer()
_LINE_BYTES = 64


class BFloat(ir.Type):
    """LLVM's scalar type bfloat, for which llvmlite has no class."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def named(name: str, function: Any) -> Any:
    """Returns a copy of a Python function with the name `name`.

    Numba's cache tells kernels apart by name, not by compiler options. Without different names, the second of two compilations of
    one function with different options would load the code that the first one saved."""
    copy = FunctionType(function.__code__, function.__globals__, name)
    copy.__qualname__ = name
    return copy


@intrinsic
def widen(typing_context: Any, value: Any) -> Any:
    """Returns an element (float32, or bfloat16 as uint16 bits) as float32, which is exact."""

    def identity(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    def shift(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), identity if value == types.float32 else shift


def constant(kind: ir.Type, value: int | float) -> ir.Constant:
    """Returns an LLVM constant of type `kind`: the value if that is a scalar type, or a vector with the value in all lanes."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def as_many(kind: ir.Type, scalar: ir.Type) -> ir.Type:
    """Returns the vector type of `scalar` elements with as many lanes as the vector type `kind` has, or `scalar` itself if `kind`
    is not a vector type."""
    return ir.VectorType(scalar, kind.count) if isinstance(kind, ir.VectorType) else scalar


def narrow_bits(builder: ir.IRBuilder, value: Any) -> Any:
    """Returns float32 (a scalar or a vector) as bfloat16 bits, rounded to nearest even; NaN stays NaN. On processors with an
    instruction for this (AVX512-BF16), magnitudes below 2**-126 become 0."""
    short = as_many(value.type, ir.IntType(16))
    if HAS_BFLOAT16_PRODUCTS:
        return builder.bitcast(builder.fptrunc(value, as_many(value.type, BFloat())), short)
    words = as_many(value.type, _I32)
    bits, sixteen = builder.bitcast(value, words), constant(words, 16)
    odd = builder.and_(builder.lshr(bits, sixteen), constant(words, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(words, 0x7FFF))), sixteen)
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, constant(words, 0x7FC0), rounded), short)


@intrinsic
def narrow(typing_context: Any, value: Any, like: Any) -> Any:
    """Returns value (float32), rounded to the element type of `like` (float32, or bfloat16 bits); see narrow_bits."""

    def identity(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    def to_bfloat16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return narrow_bits(builder, args[0])

    return like(types.float32, like), identity if like == types.float32 else to_bfloat16


def prefetch_line(builder: ir.IRBuilder, address: Any, nearness: int = 2) -> None:
    """Emits a prefetch, for reading, of the cache line at an address. nearness: 3 for the first-level cache, 2 for the second. The
    address may be out of range, because nothing is read."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    read, is_data = ir.Constant(_I32, 0), ir.Constant(_I32, 1)
    builder.call(function, [builder.bitcast(address, _BYTES), read, ir.Constant(_I32, nearness), is_data])


def _ask_for(offsets: Iterable[int], nearness: int, context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> None:
    """Emits prefetches, for reading, of several cache lines: those at each of `offsets` bytes after array[index]. nearness: 3 for
    the first-level cache, 2 for the second."""
    data = context.make_array(array_type)(context, builder, array).data
    begin = builder.bitcast(builder.gep(data, [index]), _BYTES)
    for offset in offsets:
        prefetch_line(builder, builder.gep(begin, [ir.Constant(ir.IntType(64), offset)]), nearness)


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetches the cache line of array[index] into the first-level cache. The index may be out of range, because nothing is
    read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _ask_for((0,), 3, context, builder, signature.args[0], *args)
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


FETCHED_BYTES = 512  # bytes that one call of fetch_lines prefetches


@intrinsic
def fetch_lines(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetches FETCHED_BYTES bytes from array[index] on into the second-level cache. The index may be out of range, because
    nothing is read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _ask_for(range(0, FETCHED_BYTES, _LINE_BYTES), 2, context, builder, signature.args[0], *args)
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """Returns the float32 that int32 bits encode."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(typing_context: Any, value: Any) -> Any:
    """Returns the bits of a float32 as int32, unchanged."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), generate


@intrinsic
def bits_of_element(typing_context: Any, element: Any) -> Any:
    """Returns the bits of an element (float32, or bfloat16 as uint16) as a signed integer of the same width, for `ordered` and
    `magnitude`."""
    kind = types.int32 if element == types.float32 else types.int16

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32) if element == types.float32 else args[0]

    return kind(element), generate


@intrinsic
def value_of_bits(typing_context: Any, bits: Any) -> Any:
    """Returns an element as float32. bits: the bits of the element (int32 of float32, int16 of bfloat16), as bits_of_element
    returns them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = args[0] if bits == types.int32 else builder.shl(builder.zext(args[0], _I32), _I32(16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(bits), generate


@intrinsic
def ordered(typing_context: Any, bits: Any) -> Any:
    """Returns an integer with the same order as the float whose bits are given (int16 or int32, signed). It flips the magnitude
    bits of negative floats, so applying it twice gives the bits back."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = args[0].type
        negative = builder.ashr(args[0], ir.Constant(kind, kind.width - 1))
        return builder.xor(args[0], builder.and_(negative, ir.Constant(kind, (1 << (kind.width - 1)) - 1)))

    return bits(bits), generate


@intrinsic
def magnitude(typing_context: Any, bits: Any) -> Any:
    """Returns the bits of a float (int16 or int32) with the sign bit cleared. As an integer, the result has the order of the
    magnitudes, with infinity above all numbers and NaN above infinity."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = args[0].type
        return builder.and_(args[0], ir.Constant(kind, (1 << (kind.width - 1)) - 1))

    return bits(bits), generate


@intrinsic
def _clamped(typing_context: Any, value: Any) -> Any:
    """Returns a float32, or float32 lanes, clamped to between -87 and 88. NaN becomes 88."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for sign, limit in (("<", 88.0), (">", -87.0)):
            edge = constant(args[0].type, limit)
            args = [builder.select(builder.fcmp_ordered(sign, args[0], edge), args[0], edge)]
        return args[0]

    return value(value), generate


@intrinsic
def _floor(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = args[0].type
        name = f"llvm.floor.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.floor.f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), name), args)

    return value(value), generate


@intrinsic
def _power_of_two(typing_context: Any, exponent: Any) -> Any:
    """Returns 2**exponent as float32, for a float32, or float32 lanes, that are whole numbers from -126 to 127."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = as_many(args[0].type, _I32)
        biased = builder.add(builder.fptosi(args[0], words), constant(words, 127))
        return builder.bitcast(builder.shl(biased, constant(words, 23)), args[0].type)

    return exponent(exponent), generate


@njit(inline="always", fastmath=FASTMATH)
def exp(x: Any) -> Any:
    """Returns e**x for a float32, or float32 lanes (lanes.py), with a relative error below 3e-7. x is clamped to between -87 and
    88.

    It is computed as 2**n * e**f with f in [-ln 2 / 2, ln 2 / 2], with a polynomial of degree 7 for e**f."""
    clamped = _clamped(x)
    # not the usual trick of adding and subtracting 1.5 * 2**23, because sums that may be reordered cancel it out
    whole = _floor(clamped * float32(1.4426950408889634) + float32(0.5))
    f = (clamped - whole * float32(0.693359375)) - whole * float32(-2.12194440e-4)
    p = f * float32(1.9875691500e-4) + float32(1.3981999507e-3)
    p = p * f + float32(8.3334519073e-3)
    p = p * f + float32(4.1665795894e-2)
    p = p * f + float32(1.6666665459e-1)
    p = p * f + float32(5.0000001201e-1)
    p = p * f * f + f + float32(1.0)
    return p * _power_of_two(whole)


HASH_STEP = 0x9E3779B1  # factor that an index is multiplied with first
UNMIXED_BITS = 17  # number of low bits of a hash that its last step changes


def mixed(builder: ir.IRBuilder, h: Any, shift: int = 32 - UNMIXED_BITS) -> Any:
    """Returns h ^ (h >> shift) for an unsigned 32-bit word, or a vector of these. With the default shift it is the last step of
    hash_words."""
    return builder.xor(h, builder.lshr(h, constant(h.type, shift)))


def unmixed_words(builder: ir.IRBuilder, index: Any, key0: Any, key1: Any) -> Any:
    """Returns the result of hash_words before its last step. index: already multiplied by HASH_STEP (modulo 2**32). The last step
    changes only the lowest UNMIXED_BITS bits of the result."""

    def times(h: Any, factor: int) -> Any:
        return builder.mul(h, constant(h.type, factor))

    h = builder.xor(index, key0)
    h = times(mixed(builder, h, 16), 0x85EBCA6B)
    h = times(mixed(builder, h, 13), 0xC2B2AE35)
    h = builder.add(mixed(builder, h, 16), key1)
    h = times(mixed(builder, h, 15), 0x2C1B3C6D)
    return times(mixed(builder, h, 12), 0x297A2D39)


def hash_words(builder: ir.IRBuilder, index: Any, key0: Any, key1: Any) -> Any:
    """Returns a hash of (index, key0, key1): 32 well mixed bits, by two rounds of a multiply-xorshift finaliser. Each argument and
    the result are 32-bit words, or vectors of them."""
    return mixed(builder, unmixed_words(builder, builder.mul(index, constant(index.type, HASH_STEP)), key0, key1))


@intrinsic
def hash32(typing_context: Any, index: Any, key0: Any, key1: Any) -> Any:
    """Returns hash_words of three uint32 numbers as uint32, for kernels."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return hash_words(builder, *args)

    return types.uint32(*(types.uint32,) * 3), generate


@njit(inline="always", fastmath=FASTMATH)
def uniform(bits: int) -> float:
    """Returns (bits + 1/2) / 2**32 in float32, for 32 uniform bits (uint32): a uniform random number, never 0, and 1 at most."""
    return (float32(bits) + float32(0.5)) * float32(2.3283064365386963e-10)


@njit(inline="always", fastmath=FASTMATH)
def exponential(bits: int) -> float:
    """Returns an exponential random number of mean 1, made from 32 uniform bits (uint32): -log(1 - (bits + 1/2) / 2**32) in
    float32.

    The result is never 0, because a token with a time of 0 would win the race (race.py) whatever its weight. Small results decide
    the race, so they keep their relative precision: for u = (bits + 1/2) / 2**32 below 1/64 a series is used, else the logarithm of
    (1 - u)."""
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
