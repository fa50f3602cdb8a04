"""Lets Numba kernels compute with 16 float32 or int32 at a time, in row-wise loops that Numba's vectoriser compiles badly.

The vectoriser mixes vectors of 256 and 512 bits, widens integers to 64 bits, and loads elements one by one if an index might be
negative. Here the width is explicit: a kernel loads 16 elements (`load`), computes with + - * / as with a single one, and stores
them (`store`). On a processor with narrower vectors each operation uses two of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from engine.cpu.kernels.bits import HASH_STEP, mixed, narrow_bits, unmixed_words
from engine.cpu.kernels.vectors import I32, LANES, PAIRS, SUMS, exp2, shuffle, splat, vector


class _Lanes(types.Type):
    """The Numba type of a kernel's value that consists of 16 numbers (lanes). backend: its type in LLVM. scalar: the Numba type of
    one of the numbers."""

    def __init__(self, name: str, backend: ir.VectorType, scalar: types.Type) -> None:
        super().__init__(name)
        self.backend, self.scalar = backend, scalar


FLOATS = _Lanes("float32x16", SUMS, types.float32)
WORDS = _Lanes("int32x16", PAIRS, types.int32)


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: _Lanes) -> None:
        super().__init__(manager, kind, kind.backend)


def _define(operation: Any, kind: _Lanes, generate: Callable[..., Any]) -> None:
    """Defines `operation` (such as operator.add) in kernels for two values of type `kind`, and for one such value and a scalar of
    its element type, which is used in all lanes. generate(builder, left, right) returns the LLVM value of the result."""
    sides = [(kind, kind), (kind, kind.scalar), (kind.scalar, kind)]
    cases = [signature(kind, *pair) for pair in sides]
    infer_global(operation)(type("Template", (ConcreteTemplate,), {"cases": cases}))

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left, right = (arg if own == kind else splat(builder, arg, kind.backend) for own, arg in zip(sig.args, args, strict=True))
        return generate(builder, left, right)

    for pair in sides:
        lower_builtin(operation, *pair)(lower)


_define(operator.add, FLOATS, lambda builder, left, right: builder.fadd(left, right))
_define(operator.iadd, FLOATS, lambda builder, left, right: builder.fadd(left, right))
_define(operator.sub, FLOATS, lambda builder, left, right: builder.fsub(left, right))
_define(operator.mul, FLOATS, lambda builder, left, right: builder.fmul(left, right))
_define(operator.truediv, FLOATS, lambda builder, left, right: builder.fdiv(left, right))
_define(operator.add, WORDS, lambda builder, left, right: builder.add(left, right))
_define(operator.sub, WORDS, lambda builder, left, right: builder.sub(left, right))


@intrinsic
def lanes_of(typing_context: Any, value: Any) -> Any:
    """Returns 16 lanes that all hold a float32, or an int32."""
    kind = FLOATS if value == types.float32 else WORDS

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return splat(builder, args[0], kind.backend)

    return kind(kind.scalar), generate


def _address(context: Any, builder: Any, kind: Any, array: Any, at: Any, count: Any) -> tuple[Any, Any, Any]:
    """Returns three things for the 16 elements of an array (of Numba type `kind`) from index `at` on: a pointer to them, the LLVM
    type of a vector of them, and a mask [16] that is true for the first `count`."""
    data = context.make_array(kind)(context, builder, array).data
    raw = ir.VectorType(context.get_data_type(kind.dtype), LANES)
    places = ir.Constant(PAIRS, list(range(LANES)))
    mask = builder.icmp_signed("<", places, splat(builder, builder.trunc(count, I32), PAIRS))
    return builder.bitcast(builder.gep(data, [at]), raw.as_pointer()), raw, mask


def _suffix(raw: ir.VectorType) -> str:
    return "f32" if raw.element == ir.FloatType() else f"i{raw.element.width}"


def _raw(context: Any, builder: Any, kind: Any, array: Any, at: Any, count: Any, other: float = 0) -> Any:
    """Returns a vector whose first lanes are `count` elements of an array (of Numba type `kind`), from index `at` on, unchanged,
    and whose other lanes are `other`."""
    address, raw, mask = _address(context, builder, kind, array, at, count)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(raw, [address.type, mask.type, raw]),
        f"llvm.masked.load.v{LANES}{_suffix(raw)}.p0",
    )
    return builder.call(function, [address, mask, vector(raw, other)])


def _loaded(context: Any, builder: Any, kind: Any, array: Any, at: Any, count: Any, other: float = 0) -> Any:
    """Returns the same as _raw, except that bfloat16 bits become float32; `other` must then be 0."""
    raw = _raw(context, builder, kind, array, at, count, other)
    return _widened(builder, raw) if kind.dtype == types.uint16 else raw


def _widened(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, PAIRS), vector(PAIRS, 16)), SUMS)


@intrinsic
def load(typing_context: Any, array: Any, at: Any, count: Any) -> Any:
    """Returns lanes of which the first `count` (16 at most) are elements of an array from index `at` on, and the others are 0.
    float32 and bfloat16 bits (uint16) become float32; int32 stays int32.

    The array's rows must lie end to end; indices are not checked. If the compiler knows that count is 16, it needs no mask. To load
    from one row of many, an index into the whole array is cheaper than a slice, because Numba counts references to slices."""
    kind = WORDS if array.dtype == types.int32 else FLOATS

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _loaded(context, builder, sig.args[0], *args)

    return kind(array, types.int64, types.int64), generate


def _load_unless_empty(other: float) -> Any:
    @intrinsic
    def load_unless_empty(typing_context: Any, array: Any, at: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            own, begin, num = args
            size = builder.extract_value(context.make_array(sig.args[0])(context, builder, own).shape, 0)
            num = builder.select(builder.icmp_signed(">", size, ir.Constant(size.type, 0)), num, ir.Constant(num.type, 0))
            return _loaded(context, builder, sig.args[0], own, begin, num, other)

        return FLOATS(array, types.int64, types.int64), generate

    return load_unless_empty


# They are `load` for arrays that may be empty, whose lanes are all 0, or for factors (float32) all 1. A kernel that asked for an
# array's size instead would have Numba count its references at every branch: that took 10 times as long as the rest of a row's end.
load_terms, load_factors = _load_unless_empty(0), _load_unless_empty(1.0)


def _alternate(odd: int) -> Any:
    @intrinsic
    def load_alternate(typing_context: Any, array: Any, at: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            own, begin, num = args
            halves = []
            twice = builder.mul(num, ir.Constant(num.type, 2))
            for half in range(2):
                first, left = ir.Constant(num.type, half * LANES), builder.sub(twice, ir.Constant(num.type, half * LANES))
                halves.append(_raw(context, builder, sig.args[0], own, builder.add(begin, first), left))
            chosen = shuffle(builder, halves[0], halves[1], list(range(odd, 2 * LANES, 2)))
            return _widened(builder, chosen) if array.dtype == types.uint16 else chosen

        return FLOATS(array, types.int64, types.int64), generate

    return load_alternate


# They return every second of 2 * count elements (float32 or bfloat16 bits) from index `at` on, the first or the second of each two.
# In the other lanes is 0.
load_even, load_odd = _alternate(0), _alternate(1)


@intrinsic
def limited(typing_context: Any, values: Any, least: Any, most: Any) -> Any:
    """Returns float32 lanes clamped to between least and most (float32). NaN stays NaN."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        values, *bounds = args
        for sign, bound in zip("<>", bounds, strict=True):
            edge = splat(builder, bound, SUMS)
            values = builder.select(builder.fcmp_ordered(sign, values, edge), edge, values)
        return values

    return FLOATS(FLOATS, types.float32, types.float32), generate


@intrinsic
def store(typing_context: Any, array: Any, at: Any, count: Any, values: Any) -> Any:
    """Stores the first `count` lanes to elements of an array from index `at` on. If the elements are bfloat16 bits (uint16), the
    lanes are float32 and are rounded as by `narrow`; otherwise elements and lanes must have the same type."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        address, raw, mask = _address(context, builder, sig.args[0], *args[:3])
        kept = narrow_bits(builder, args[3]) if array.dtype == types.uint16 else args[3]
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [raw, address.type, mask.type]),
            f"llvm.masked.store.v{LANES}{_suffix(raw)}.p0",
        )
        builder.call(function, [kept, address, mask])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, values), generate


@intrinsic
def rounded(typing_context: Any, values: Any, like: Any) -> Any:
    """Returns float32 lanes, rounded to the element type of `like` (float32 or bfloat16 bits), as float32."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        return _widened(builder, narrow_bits(builder, args[0]))

    return FLOATS(FLOATS, like), generate


@intrinsic
def kept(typing_context: Any, values: Any, bits: Any, cutoff: Any, other: Any) -> Any:
    """Returns `values` in the lanes in which `bits` (int32, signed) are at least cutoff, and the scalar `other` in all other
    lanes."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        backend = args[0].type
        stays = builder.icmp_signed(">=", args[1], splat(builder, args[2], PAIRS))
        return builder.select(stays, args[0], splat(builder, args[3], backend))

    return values(values, WORDS, types.int32, values.scalar), generate


def _reduction(name: str, kind: _Lanes) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        scalar = kind.backend.element
        start = [ir.Constant(scalar, 0.0)] if kind == FLOATS else []
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(scalar, [*(one.type for one in start), kind.backend]),
            f"llvm.vector.reduce.{name}.v{LANES}{_suffix(kind.backend)}",
        )
        fastmath = ("reassoc",) if kind == FLOATS else ()
        return builder.call(function, [*start, args[0]], fastmath=fastmath)

    return kind.scalar(kind), generate


@intrinsic
def total_of(typing_context: Any, lanes: Any) -> Any:
    """Returns the sum of 16 float32 lanes, added up in an order that the compiler chooses."""
    return _reduction("fadd", FLOATS)


@intrinsic
def bits_of(typing_context: Any, values: Any) -> Any:
    """Returns the bits of 16 float32 lanes as lanes of int32, unchanged."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], PAIRS)

    return WORDS(FLOATS), generate


@intrinsic
def unmixed_hashes(typing_context: Any, first: Any, key0: Any, key1: Any) -> Any:
    """Returns bits.unmixed_words of the 16 numbers from `first` (int64) on as words, all with the same keys (uint32)."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        first, *keys = args
        step = [HASH_STEP * lane % 2**32 for lane in range(LANES)]
        begin = builder.mul(builder.trunc(first, I32), I32(HASH_STEP))
        products = builder.add(splat(builder, begin, PAIRS), ir.Constant(PAIRS, step))
        return unmixed_words(builder, products, *(splat(builder, key, PAIRS) for key in keys))

    return WORDS(types.int64, types.uint32, types.uint32), generate


@intrinsic
def hashes(typing_context: Any, unmixed: Any) -> Any:
    """Returns the finished hashes (bits.hash_words): applies the last step of the hash to words that unmixed_hashes has
    returned."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return mixed(builder, args[0])

    return WORDS(WORDS), generate


@intrinsic
def float_of_hashes(typing_context: Any, words: Any) -> Any:
    """Returns lanes of unsigned words as float32 numbers, from 0 to below 2**32."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.uitofp(args[0], SUMS)

    return FLOATS(WORDS), generate


@intrinsic
def lower_hashes(typing_context: Any, left: Any, right: Any) -> Any:
    """Returns, in each lane, the smaller of two unsigned words."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.icmp_unsigned("<", *args), *args)

    return WORDS(WORDS, WORDS), generate


def _marks(builder: ir.IRBuilder, comparison: Any) -> Any:
    """Returns the result of a comparison of lanes (a vector of 16 i1) as an int64, whose bit i is the result in lane i."""
    return builder.zext(builder.bitcast(comparison, ir.IntType(LANES)), ir.IntType(64))


@intrinsic
def hashes_up_to(typing_context: Any, words: Any, limit: Any) -> Any:
    """Returns an int64 whose bit i is set if lane i of words (unsigned) is at most limit (uint32)."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _marks(builder, builder.icmp_unsigned("<=", args[0], splat(builder, args[1], PAIRS)))

    return types.int64(WORDS, types.uint32), generate


@intrinsic
def up_to(typing_context: Any, values: Any, limits: Any) -> Any:
    """Returns an int64 whose bit i is set if lane i of values is at most lane i of limits (both float32). The bit is 0 if either is
    NaN."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _marks(builder, builder.fcmp_ordered("<=", *args))

    return types.int64(FLOATS, FLOATS), generate


@intrinsic
def at_least(typing_context: Any, words: Any, limit: Any) -> Any:
    """Returns an int64 whose bit i is set if lane i of words (signed) is at least limit (int32)."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _marks(builder, builder.icmp_signed(">=", args[0], splat(builder, args[1], PAIRS)))

    return types.int64(WORDS, types.int32), generate


@intrinsic
def kept_up_to(typing_context: Any, values: Any, keys: Any, limit: Any) -> Any:
    """Returns the float32 `values` in the lanes in which `keys` (float32 lanes) are at most limit, and 0 in all other lanes, also
    where a key is NaN."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        stays = builder.fcmp_ordered("<=", args[1], splat(builder, args[2], SUMS))
        return builder.select(stays, args[0], vector(SUMS, 0.0))

    return FLOATS(FLOATS, FLOATS, types.float32), generate


@intrinsic
def first_lanes(typing_context: Any, values: Any, count: Any) -> Any:
    """Returns float32 lanes with all but the first `count` set to 0."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        places = ir.Constant(PAIRS, list(range(LANES)))
        stays = builder.icmp_signed("<", places, splat(builder, builder.trunc(args[1], I32), PAIRS))
        return builder.select(stays, args[0], vector(SUMS, 0.0))

    return FLOATS(FLOATS, types.int64), generate


@intrinsic
def exp_for_bfloat16(typing_context: Any, values: Any) -> Any:
    """Returns e**x of float32 lanes with a relative error below 1e-5, in two thirds of the instructions of bits.exp. Results are
    limited to between 2**-126 and 2**127."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        power, most = builder.fmul(args[0], vector(SUMS, 1.4426950408889634)), vector(SUMS, 127.0)
        return exp2(builder, builder.select(builder.fcmp_ordered(">", power, most), most, power))

    return FLOATS(FLOATS), generate


ROUGH_ERROR = 2e-3
# A polynomial for 2**f with f from -0.5 to 0.5, fitted for the smallest maximum of the relative error (1.73e-3).
_ROUGH_EXP2 = (1.00044314, 0.70344803, 0.23842894)


@intrinsic
def rough_exp2(typing_context: Any, values: Any) -> Any:
    """Returns 2**x of float32 lanes up to 127, with a relative error below ROUGH_ERROR, at a third of the cost of an exact
    computation. Below -126 it returns 2**-126."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return exp2(builder, args[0], _ROUGH_EXP2)

    return FLOATS(FLOATS), generate
