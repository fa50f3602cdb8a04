"""Numba's way to 16 float32 or int32 at a time: what row-wise loops are written with where its vectoriser does badly.

It mixes vectors of 256 and 512 bits, widens integers to 64 bits and fetches one by one what an index might find from the end. Here
the width is said: `load` 16 elements, compute with + - * / as with one, `store` them. A processor whose vectors are narrower takes
two for one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from engine.kernels.cpu_bits import hash_words, narrow_bits
from engine.kernels.cpu_vectors import I32, LANES, PAIRS, SUMS, splat, vector


class _Lanes(types.Type):
    """16 of a kind, as one value of a kernel."""

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
    """operation (an operator) of two of the kind, or of one and a scalar of its elements' type, which all lanes meet."""
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
    """A float32 or int32 in all lanes."""
    kind = FLOATS if value == types.float32 else WORDS

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return splat(builder, args[0], kind.backend)

    return kind(kind.scalar), generate


@intrinsic
def counted_from(typing_context: Any, first: Any) -> Any:
    """first (int64), first + 1 and so on, modulo 2**32."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        first = splat(builder, builder.trunc(args[0], I32), PAIRS)
        return builder.add(first, ir.Constant(PAIRS, list(range(LANES))))

    return WORDS(types.int64), generate


def _address(context: Any, builder: Any, kind: Any, array: Any, at: Any, count: Any) -> tuple[Any, Any, Any]:
    """Of 16 elements from index `at` on: a pointer to them, and which of them are among the first `count`."""
    data = context.make_array(kind)(context, builder, array).data
    raw = ir.VectorType(context.get_data_type(kind.dtype), LANES)
    places = ir.Constant(PAIRS, list(range(LANES)))
    mask = builder.icmp_signed("<", places, splat(builder, builder.trunc(count, I32), PAIRS))
    return builder.bitcast(builder.gep(data, [at]), raw.as_pointer()), raw, mask


def _suffix(raw: ir.VectorType) -> str:
    return "f32" if raw.element == ir.FloatType() else f"i{raw.element.width}"


@intrinsic
def load(typing_context: Any, array: Any, at: Any, count: Any) -> Any:
    """count elements from index `at` on, of an array whose rows lie end to end, as float32 (bfloat16 bits widened) or, if int32, as
    they are; 0 in the lanes behind. Indices are not checked. A count that is known to be 16 makes no mask. For a row of many, an
    index is cheaper than a slice, whose references Numba counts."""
    kind = WORDS if array.dtype == types.int32 else FLOATS

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        address, raw, mask = _address(context, builder, sig.args[0], *args)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(raw, [address.type, mask.type, raw]),
            f"llvm.masked.load.v{LANES}{_suffix(raw)}.p0",
        )
        loaded = builder.call(function, [address, mask, vector(raw, 0)])
        if array.dtype != types.uint16:
            return loaded
        return builder.bitcast(builder.shl(builder.zext(loaded, PAIRS), vector(PAIRS, 16)), SUMS)

    return kind(array, types.int64, types.int64), generate


@intrinsic
def store(typing_context: Any, array: Any, at: Any, count: Any, values: Any) -> Any:
    """The first lanes to count elements from index `at` on, rounded as `narrow` does if they are bfloat16 bits."""

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
    """Lanes as they would come back from an array of elements like this one: float32, or bfloat16 bits."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        wide = builder.zext(narrow_bits(builder, args[0]), PAIRS)
        return builder.bitcast(builder.shl(wide, vector(PAIRS, 16)), SUMS)

    return FLOATS(FLOATS, like), generate


@intrinsic
def kept(typing_context: Any, values: Any, bits: Any, cutoff: Any, other: Any) -> Any:
    """values in the lanes whose bits (int32) are at least cutoff, `other` in all others."""

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
    """All 16 float32 added up."""
    return _reduction("fadd", FLOATS)


@intrinsic
def least_of(typing_context: Any, lanes: Any) -> Any:
    """Of 16 int32."""
    return _reduction("smin", WORDS)


@intrinsic
def lower(typing_context: Any, left: Any, right: Any) -> Any:
    """The lower int32 of each lane."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed("<", *args), *args)

    return WORDS(WORDS, WORDS), generate


@intrinsic
def bits_of(typing_context: Any, values: Any) -> Any:
    """float32 as int32 bits."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], PAIRS)

    return WORDS(FLOATS), generate


@intrinsic
def floats_of(typing_context: Any, bits: Any) -> Any:
    """int32 bits as float32."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], SUMS)

    return FLOATS(WORDS), generate


@intrinsic
def hashed(typing_context: Any, index: Any, key0: Any, key1: Any) -> Any:
    """hash32 of each index and the same keys (uint32), as float32 from 0 to 2**32."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        keys = (splat(builder, key, PAIRS) for key in args[1:])
        return builder.uitofp(hash_words(builder, args[0], *keys), SUMS)

    return FLOATS(WORDS, types.uint32, types.uint32), generate
