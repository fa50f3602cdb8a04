"""Has Triton's interpreter compute an operator at once where the operands' types leave nothing to convert: numbers of one type,
bits, and pointers with an offset. Otherwise it goes through six functions for each, as it still does for all else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.interpreter_types import MOST_KEPT, STAY

ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
DIVISIONS = {"truediv": np.divide}
NUMBERS = STAY - {"int1"}
INTEGERS = NUMBERS - {"fp32", "fp64"}
BOOL = np.dtype(np.bool_)
EVERYTHING = slice(None)


def quick(interpreter: Any, directly: Callable[[Any], Any]) -> dict[Any, Any]:
    """Returns what stands for operators of the language's tensors, by the operator. directly: what stands for all others."""
    members = vars(interpreter.tl.core.tensor)
    found = {}
    for of, names in ((ARITHMETIC, NUMBERS), (COMPARISONS, NUMBERS), (BITS, {"int1", *INTEGERS}), (DIVISIONS, {"fp32", "fp64"})):
        for name, compute in of.items():
            member = members[f"__{name}__"]
            found[member] = _operator(interpreter, name, compute, names, directly(member))
    for name in ("add", "mul"):  # of which either operand may be the first
        reflected = members[f"__r{name}__"]
        found[reflected] = _operator(interpreter, name, ARITHMETIC[name], NUMBERS, directly(reflected))
    index = members["__getitem__"]
    found[index] = _index(interpreter, directly(index))
    return found


def _common(left: Any, right: Any) -> list[int] | None:
    """Returns the sizes that values of two types have together, [] for two scalars, None for blocks that do not go together."""
    if not (left.is_block() and right.is_block()):
        return list(left._sizes if left.is_block() else right._sizes if right.is_block() else [])
    pairs = list(zip(left._sizes, right._sizes, strict=False))
    if len(left._sizes) != len(right._sizes) or any(a != b and 1 not in (a, b) for a, b in pairs):
        return None
    return [max(pair) for pair in pairs]


def _operator(interpreter: Any, name: str, compute: Any, names: set[str], slow: Any) -> Any:
    """Returns what stands for an operator. compute: NumPy's function of it. names: of the types that it is computed for here. slow:
    what stands for it otherwise."""
    language, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    tensor, constexpr, handle, builder = language.tensor, language.constexpr, interpreter.TensorHandle, semantic.builder
    results, beside = f"_results_of_{name}", f"_beside_{name}"
    compares = name in COMPARISONS

    def result_of(left: Any, right: Any) -> tuple[Any, int]:
        """Returns the type of a result, None if it is not for here, and the bytes by which an offset of 1 moves a pointer."""
        sizes, scalar, other = _common(left, right), left.scalar, right.scalar
        if sizes is None:
            return None, 0
        if scalar is other and scalar.name in names:
            made, width = language.int1 if compares else scalar, 0
        elif name == "add" and scalar.is_ptr() and other.name in INTEGERS:
            made, width = scalar, max(1, scalar.element_ty.primitive_bitwidth // 8)
        else:
            return None, 0
        return language.block_type(made, sizes) if sizes else made, width

    def operand(value: Any, number: Any) -> Any:
        """Returns the operand that a number becomes, None if the value beside it becomes another one, too."""
        if value.dtype.name not in names:
            return None
        same, other = semantic.binary_op_type_checking_impl(value, number)
        return other if same is value and other.handle.data.size <= MOST_KEPT else None

    def kept_of(kind: Any, what: str) -> dict[Any, Any]:
        kept: dict[Any, Any] | None = kind.__dict__.get(what)
        if kept is None:
            kept = {}
            setattr(kind, what, kept)
        return kept

    def operator(self: Any, other: Any) -> Any:
        given, left, kind = other, self.type, type(other)
        if kind is constexpr:
            other = other.value
            kind = type(other)
        if kind is tensor:
            right = other.type
            kept = kept_of(left, results)
            found = kept.get(id(right))
            if found is None:
                found = *result_of(left, right), right  # which the last keeps alive, so that its id is no other type's
                if not right.scalar.is_ptr():  # each launch has its own types of pointers
                    kept[id(right)] = found
            made, width, _ = found
        elif kind in (int, float) and not math.isnan(other):  # which equals nothing
            kept, number = kept_of(left, beside), (kind, other or repr(other))  # zeros have signs
            if number not in kept:
                if len(kept) >= MOST_KEPT:
                    kept.clear()
                kept[number] = operand(self, other)
            other = kept[number]
            made, width = None if other is None else left.with_element_ty(language.int1) if compares else left, 0
        else:
            return slow(self, given)
        if made is None or builder.options.debug:
            return slow(self, given)
        one, two = self.handle, other.handle
        if width:
            return tensor(handle(one.data + width * two.data.astype(np.uint64), one.dtype), made)
        if one.data.dtype != two.data.dtype or (one.data.dtype == BOOL and compute in ARITHMETIC.values()):
            return slow(self, given)
        return tensor(handle(compute(one.data, two.data), one.dtype), made)

    return operator


def _index(interpreter: Any, slow: Any) -> Any:
    """Returns what stands for the index of a tensor, which adds dimensions of one."""
    language = interpreter.tl.core
    tensor, block_type, handle = language.tensor, language.block_type, interpreter.TensorHandle

    def getitem(self: Any, slices: Any) -> Any:
        kind = self.type
        if type(slices) is tuple and kind.is_block():
            added = tuple(one is None for one in slices)
            kept = kind.__dict__.get("_indexed")
            if kept is None:
                kept = kind._indexed = {}
            if added not in kept:
                sizes = iter(kind._sizes)
                kept[added] = (
                    block_type(kind.scalar, [1 if one else next(sizes) for one in added])
                    if len(added) - sum(added) == len(kind._sizes)
                    else None
                )
            made = kept[added]
            if made is not None and all(one is None or one == EVERYTHING for one in slices):
                return tensor(handle(self.handle.data[slices], self.handle.dtype), made)
        return slow(self, slices)

    return getitem
