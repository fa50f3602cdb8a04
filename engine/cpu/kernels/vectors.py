"""Provides functions with which the tiles of CPU kernels are written: LLVM vectors of 16 float32, and loads and products of
elements.

Elements are float32, bfloat16 as uint16 bits, and for weights also int8. If both operands of a product have at most 16 bits, they
are multiplied as bfloat16 pairs if the processor can (AVX512-BF16, vdpbf16ps, which Numba's vectoriser does not know). On other
processors pairs of bfloat16 are widened first, and int8 weights are multiplied by widened_linear.py."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.cpu.kernels.bits import HAS_BFLOAT16_PRODUCTS, BFloat, prefetch_line

LANES = 16  # float32 values in a vector

I32, I64 = ir.IntType(32), ir.IntType(64)
FLOAT = ir.FloatType()
SUMS = ir.VectorType(FLOAT, LANES)
PAIRS = ir.VectorType(I32, LANES)
BFLOATS = ir.VectorType(BFloat(), 2 * LANES)
HALF_BFLOATS = ir.VectorType(BFloat(), LANES)
# A polynomial for 2**f with f from -0.5 to 0.5, fitted for the smallest maximum of the relative error: 8e-8, or 2.4e-7 as computed
# in float32.
EXP2 = (
    1.0000000716546715,
    0.6931469670643626,
    0.2402211972388193,
    0.05550713274148667,
    0.009675541332768824,
    0.0013276471782186472,
)
_ROUNDER = 1.5 * 2.0**23  # a float32 without fractional bits, so that adding x to it rounds x to a whole number


def vector(kind: ir.Type, value: int | float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


class Loader:
    """Emits the loads of an array's elements, as many as one step of a product uses: 32 elements as 16 bfloat16 pairs if paired,
    else 16 elements as float32. paired: whether both operands of the product have at most 16 bits. data: a pointer to the array's
    first element. element: float32, uint16 (bfloat16 bits) or int8."""

    def __init__(self, builder: ir.IRBuilder, data: Any, element: types.Type, paired: bool) -> None:
        self._builder, self._element, self._paired = builder, element, paired
        self._data = data
        self.step = 2 * LANES if paired else LANES

    def prefetch(self, at: Any, nearness: int = 3) -> None:
        """Emits a prefetch of the cache line of the element at index `at`, into the first-level cache (nearness 3) or the second
        (2)."""
        prefetch_line(self._builder, self._builder.gep(self._data, [at]), nearness)

    def __call__(self, at: Any, count: Any = None) -> Any:
        """Returns the elements of one step from index `at` on, as bfloat16 pairs or float32. count (i32): only the first `count`
        elements are read, and the others are 0; None: all are read."""
        builder, loaded = self._builder, self.raw(at, count)
        if self._element == types.int8:
            wide = builder.sitofp(loaded, ir.VectorType(FLOAT, self.step))
            if not self._paired:
                return wide
            return builder.bitcast(builder.fptrunc(wide, BFLOATS), PAIRS)
        if self._paired:
            return builder.bitcast(loaded, PAIRS)
        if self._element == types.uint16:
            wide = builder.zext(loaded, PAIRS)
            return builder.bitcast(builder.shl(wide, vector(PAIRS, 16)), SUMS)
        return builder.bitcast(loaded, SUMS)

    def raw(self, at: Any, count: Any = None) -> Any:
        """Returns the stored bits of the elements of one step from index `at` on, as a vector of integers. count (i32): only the
        first `count` elements are read, and the others are 0; None: all are read."""
        builder = self._builder
        bits = ir.IntType(32 if self._element == types.float32 else 16 if self._element == types.uint16 else 8)
        raw = ir.VectorType(bits, self.step)
        address = builder.bitcast(builder.gep(self._data, [at]), raw.as_pointer())
        if count is None:
            loaded = builder.load(address)
            loaded.align = bits.width // 8
        else:
            places = ir.Constant(ir.VectorType(I32, self.step), list(range(self.step)))
            limit = splat(builder, count, ir.VectorType(I32, self.step))
            mask = builder.icmp_signed("<", places, limit)
            name = f"llvm.masked.load.v{self.step}i{bits.width}.p0"
            kind = ir.FunctionType(raw, [address.type, mask.type, raw])
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            loaded = builder.call(function, [address, mask, vector(raw, 0)])
        return loaded


def splat(builder: ir.IRBuilder, value: Any, kind: ir.VectorType) -> Any:
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(
        single, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    )


def fma(builder: ir.IRBuilder, left: Any, right: Any, total: Any) -> Any:
    kind = ir.FunctionType(total.type, [total.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{total.type.count}f32")
    return builder.call(function, [left, right, total])


def fenced(builder: ir.IRBuilder, values: Any) -> Any:
    """Returns the given vector of 16 float32 behind a fence: the compiler may not combine or reorder the computation of the vector
    with computations that use it."""
    kind = ir.FunctionType(SUMS, [SUMS])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.arithmetic.fence.v{LANES}f32"), [values])


def exp2(builder: ir.IRBuilder, x: Any, coefficients: tuple[float, ...] = EXP2) -> Any:
    """Returns 2**x in float32 for x up to 127, as exact as the polynomial is for 2**f with f from -0.5 to 0.5. Below -126 it
    returns 2**-126. NaN and infinity become NaN."""
    least = vector(SUMS, -126.0)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    shifted = fenced(builder, builder.fadd(x, vector(SUMS, _ROUNDER)))
    f = builder.fsub(x, fenced(builder, builder.fsub(shifted, vector(SUMS, _ROUNDER))))
    power = vector(SUMS, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        power = fma(builder, power, f, vector(SUMS, coefficient))
    whole = builder.shl(builder.bitcast(shifted, PAIRS), vector(PAIRS, 23))  # in the exponent's bits
    return builder.bitcast(builder.add(builder.bitcast(power, PAIRS), whole), SUMS)


def add_products(builder: ir.IRBuilder, total: Any, left: Any, right: Any, paired: bool) -> Any:
    """Returns total + left * right for 16 float32 lanes. paired: left and right are bfloat16 pairs, and each lane adds both
    products of its pair."""
    if not paired:
        return fma(builder, left, right, total)
    if HAS_BFLOAT16_PRODUCTS:
        kind = ir.FunctionType(SUMS, [SUMS, BFLOATS, BFLOATS])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(function, [total, builder.bitcast(left, BFLOATS), builder.bitcast(right, BFLOATS)])
    upper, sixteen = vector(PAIRS, 0xFFFF0000), vector(PAIRS, 16)
    for part in (lambda pairs: builder.and_(pairs, upper), lambda pairs: builder.shl(pairs, sixteen)):
        total = fma(builder, builder.bitcast(part(left), SUMS), builder.bitcast(part(right), SUMS), total)
    return total


def fold(builder: ir.IRBuilder, vectors: list[Any]) -> Any:
    """Returns one vector whose lane i is the sum of all lanes of vector i. vectors: at most as many as a vector has lanes, of
    float32 or of words."""
    lanes = width = vectors[0].type.count  # width: number of lanes that hold parts of one sum
    add = builder.fadd if vectors[0].type.element == FLOAT else builder.add
    while width > 1:
        half = width // 2
        both = [group * width + lane for group in range(2 * lanes // width) for lane in range(half)]
        pairs = zip_longest(vectors[::2], vectors[1::2], fillvalue=ir.Constant(vectors[0].type, ir.Undefined))
        vectors = [
            add(shuffle(builder, left, right, both), shuffle(builder, left, right, [b + half for b in both]))
            for left, right in pairs
        ]
        width = half
    return vectors[0]


def shuffle(builder: ir.IRBuilder, left: Any, right: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def token_pairs(builder: ir.IRBuilder, loaded: list[Any]) -> list[Any]:
    """Regroups bfloat16 pairs, for one or two tokens. loaded: for each token a vector of pairs of its dimensions 2 i and 2 i + 1.
    Returns two vectors, whose pairs hold the same dimension of both tokens: the even dimensions, then the odd ones. With one token,
    the second element of each pair is 0."""
    lower, sixteen = vector(PAIRS, 0xFFFF), vector(PAIRS, 16)
    even, odd = builder.and_(loaded[0], lower), builder.lshr(loaded[0], sixteen)
    if len(loaded) == 2:
        even = builder.or_(even, builder.shl(loaded[1], sixteen))
        odd = builder.or_(odd, builder.and_(loaded[1], vector(PAIRS, 0xFFFF0000)))
    return [even, odd]


def for_pieces(builder: ir.IRBuilder, count: Any, step: int, body: Any) -> None:
    """Emits a loop that runs body(k) for k = 0, step, 2 step and so on, as long as whole steps of `count` are left, and then
    body(k, rest) for the remaining `rest` (i32) elements, if there are any."""
    step_value = ir.Constant(I64, step)
    whole = builder.sub(count, builder.urem(count, step_value))
    with cgutils.for_range_slice(builder, ir.Constant(I64, 0), whole, step_value) as (k, _):
        body(k)
    with builder.if_then(builder.icmp_signed("<", whole, count), likely=False):
        body(whole, builder.trunc(builder.sub(count, whole), I32))
