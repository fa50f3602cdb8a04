"""Has values of Triton's interpreter share their types, which it otherwise makes and compares anew at each operation.

A type, once made, does not change; so equal types may be one object, and what follows from a type can be kept with it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

# What two operands of the same type are computed in is their type; a division computes in float32 what has fewer bits.
STAY = {"fp32", "fp64", "int1", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
STAY_UNDIVIDED = STAY | {"fp16", "bf16"}
NUMBERS = (int, float, bool)
MOST_KEPT = 1024  # numbers beside each type, and values in each


def share(interpreter: Any) -> None:
    language = interpreter.tl.core
    _share_block_types(language)
    _keep_what_tensors_have_of_their_type(language)
    _keep_types_of_the_builder(interpreter, language)
    _compare_the_same_at_once(language)
    _leave_operands_of_one_type(interpreter.interpreter_semantic, language)
    _broadcast_by_sizes(interpreter.interpreter_semantic, language)
    _make_handles_quickly(interpreter)
    _leave_what_has_the_type(interpreter.interpreter_semantic)
    _know_at_once_what_is_unwrapped(language)
    _keep_cache_policies(language)


def _key(kind: Any) -> tuple[Any, ...]:
    """Returns what tells a scalar type or a type of pointers from others."""
    return kind.name, getattr(kind, "address_space", None)


def _share_block_types(language: Any) -> None:
    block_type, constexpr = language.block_type, language.constexpr
    make = block_type.__init__
    known: dict[Any, Any] = {}

    def new(cls: Any, *args: Any, **named: Any) -> Any:
        if cls is not block_type or named or len(args) != 2:
            return object.__new__(cls)
        element, shape = args
        sizes = tuple(size.value if type(size) is constexpr else size for size in shape)
        key = (*_key(element), sizes)
        found = known.get(key)
        if found is None:
            found = object.__new__(cls)
            make(found, element, shape)  # it refuses some shapes
            found._sizes = sizes
            known[key] = found
        return found

    def init(self: Any, *args: Any, **named: Any) -> None:
        if "name" not in self.__dict__:  # of another class, or made otherwise
            make(self, *args, **named)

    def with_element_type(self: Any, scalar: Any) -> Any:
        others = self.__dict__.setdefault("_others", {})
        key = _key(scalar)
        if key not in others:
            others[key] = block_type(scalar, self.shape)
        return others[key]

    block_type.__new__, block_type.__init__ = new, init
    block_type.with_element_ty = with_element_type


def _keep_what_tensors_have_of_their_type(language: Any) -> None:
    tensor = language.tensor
    make = tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        kept = type.__dict__.get("_of_tensors")
        if kept is None:
            make(self, handle, type)
            type._of_tensors = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = kept

    tensor.__init__ = init


def _keep_types_of_the_builder(interpreter: Any, language: Any) -> None:
    """Keeps the types that the interpreter's builder has for those of the language: signed ones for unsigned ones."""
    builder = interpreter.InterpreterBuilder

    def kept(make: Any) -> Any:
        def to_ir(self: Any, of: Any) -> Any:
            if type(of) is not builder:
                return make(self, of)
            if "_interpreted" not in self.__dict__:
                self._interpreted = make(self, of)
            return self._interpreted

        return to_ir

    for kind in (language.dtype, language.block_type, language.pointer_type):
        kind.to_ir = kept(kind.to_ir)


def _compare_the_same_at_once(language: Any) -> None:
    def compared(equal: Any) -> Any:
        return lambda self, other: self is other or equal(self, other)

    for kind in (language.dtype, language.block_type, language.pointer_type):
        hashed = kind.__hash__
        kind.__eq__ = compared(kind.__eq__)
        kind.__hash__ = hashed


def _leave_operands_of_one_type(semantic: Any, language: Any) -> None:
    """Leaves operands of the same type as they are, which is what comes of looking at what they are computed in and of making their
    shapes equal; keeps a number as the operand that it becomes beside values of a type. Nor does it look for sums that int32 does
    not hold where nothing is done about them."""
    kind, tensor = type(semantic), language.tensor
    check, look_for_overflow = kind.binary_op_type_checking_impl, kind.binary_op_sanitize_overflow_impl

    def checked(self: Any, lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
        if type(lhs) is tensor and type(rhs) is tensor and lhs.type is rhs.type:
            divides = options.get("div_or_mod", args[3] if len(args) > 3 else False)
            if lhs.dtype.name in (STAY if divides else STAY_UNDIVIDED):
                return lhs, rhs
        elif type(lhs) is tensor and type(rhs) in NUMBERS:
            return beside(self, lhs, rhs, False, args, options)
        elif type(rhs) is tensor and type(lhs) in NUMBERS:
            return beside(self, rhs, lhs, True, args, options)
        return check(self, lhs, rhs, *args, **options)

    def beside(self: Any, value: Any, number: Any, first: bool, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        kept = value.type.__dict__.get("_beside")
        if kept is None:
            kept = value.type._beside = {}
        key = number, type(number), math.copysign(1.0, number), first, args, *options.items()
        if key in kept:
            return (kept[key], value) if first else (value, kept[key])
        if first:
            other, same = check(self, number, value, *args, **options)
        else:
            same, other = check(self, value, number, *args, **options)
        if same is value and other.handle.data.size <= MOST_KEPT:
            if len(kept) >= MOST_KEPT:
                kept.clear()
            kept[key] = other
        return (other, same) if first else (same, other)

    def look(self: Any, *args: Any) -> None:
        if self is not semantic or self.builder.options.debug:
            look_for_overflow(self, *args)

    kind.binary_op_type_checking_impl = checked
    kind.binary_op_sanitize_overflow_impl = look


def _broadcast_by_sizes(semantic: Any, language: Any) -> None:
    """Finds once which sizes those of two blocks become, instead of comparing the language's own numbers at each operation."""
    kind, block_type = type(semantic), language.block_type
    broadcast = kind.broadcast_impl_value

    @functools.cache
    def common(left: tuple[int, ...], right: tuple[int, ...]) -> list[int] | None:
        if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
            return None
        return [max(a, b) for a, b in zip(left, right, strict=True)]

    def stretched(self: Any, value: Any, sizes: list[int]) -> Any:
        if value.type._sizes == tuple(sizes):
            return value
        return self.make_tensor(self.builder.create_broadcast(value.handle, sizes), block_type(value.dtype, sizes))

    def broadcast_by_sizes(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left is right:
            return lhs, rhs
        if type(left) is block_type and type(right) is block_type:
            if left._sizes == right._sizes:
                return lhs, rhs
            sizes = common(left._sizes, right._sizes)
            if sizes is not None:
                return stretched(self, lhs, sizes), stretched(self, rhs, sizes)
        return broadcast(self, lhs, rhs)

    kind.broadcast_impl_value = broadcast_by_sizes


def _make_handles_quickly(interpreter: Any) -> None:
    handle = interpreter.TensorHandle
    check = handle.__post_init__

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        largest = dtype.__dict__.get("_largest_item")
        if largest is None or data.itemsize > largest:
            check(self)  # it refuses what is larger
            dtype._largest_item = data.itemsize

    handle.__init__ = init


def _leave_what_has_the_type(semantic: Any) -> None:
    kind = type(semantic)
    convert = kind.cast

    def cast(self: Any, value: Any, to: Any, *rounding: Any, **named: Any) -> Any:
        return value if value.dtype is to else convert(self, value, to, *rounding, **named)

    kind.cast = cast


def _know_at_once_what_is_unwrapped(language: Any) -> None:
    """Gives back tensors and numbers, most of what is looked at for a value of compile time, without looking further."""
    unwrap, plain = language._unwrap_if_constexpr, {language.tensor, str, type(None), *NUMBERS}
    language._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)


def _keep_cache_policies(language: Any) -> None:
    """Keeps what loads and stores say of caches, which the interpreter has none of but checks anew each time."""
    normalize, known = language._normalize_cache_policy, dict[Any, Any]()

    def kept(policy: Any, modifier: Any, eviction: Any) -> Any:
        if policy is not None or type(modifier) is not str or type(eviction) is not str:
            return normalize(policy, modifier, eviction)
        if (modifier, eviction) not in known:
            known[modifier, eviction] = normalize(policy, modifier, eviction)
        return known[modifier, eviction]

    language._normalize_cache_policy = kept
