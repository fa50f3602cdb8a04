"""Calls compiled kernels with fixed arguments, one after the other, without Python between them.

A call from Python costs ten times as much within a step as in a tight loop, because a matrix multiplication that streams weights
through the caches displaces the interpreter's data from them. Here a list of calls is laid out as words in memory: for each call
the address of its kernel's machine code, and the arguments in the form of Numba's calling convention. One small function, generated
with llvmlite, makes all the calls."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core.registry import cpu_target

_I32, _I64, _BYTES = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
_ENTRY_WORDS = 3  # words of a call in the table: the function that unpacks its arguments, the kernel, the arguments
_CALL = ir.FunctionType(_I32, [_I64, _I64.as_pointer()])
_alive: list[Any] = []  # LLVM engines, kept because their code is in use
_unpackers: dict[tuple[Any, ...], int] = {}  # argument types -> address of the function that calls a kernel with them
_preparing = threading.Lock()


class NativeCalls:
    """A list of kernel calls that run without Python.

    calls: pairs of a kernel and its arguments. The kernel is what Numba has compiled for the types of these arguments, which are
    numbers, and arrays whose rows lie end to end. Each run reads the arrays' current elements."""

    def __init__(self, calls: Sequence[tuple[Any, Sequence[Any]]]) -> None:
        self._calls = calls  # keeps the arrays alive
        overloads = {id(overload): overload for overload, _ in calls}  # types take long to hash
        prepare([overload.signature.args for overload in overloads.values()])
        forms = {key: _forms(overload) for key, overload in overloads.items()}
        code = {key: (_unpackers[overload.signature.args], _code(overload)) for key, overload in overloads.items()}
        words = [_words(forms[id(overload)], args) for overload, args in calls]
        arguments = np.array([word for own in words for word in own], np.int64)
        self._arguments: Any = arguments  # kept alive, too
        table, at = [], arguments.ctypes.data
        for (overload, _), own in zip(calls, words, strict=True):
            table.append((*code[id(overload)], at))
            at += 8 * len(own)
        self._table = np.array(table, np.int64).reshape(len(calls), _ENTRY_WORDS)
        self._runner = _runner()
        self._table_at = self._table.ctypes.data

    def followed_by(self, other: NativeCalls) -> NativeCalls:
        """Returns a new NativeCalls that makes the calls of this object and then those of `other`. The arguments are not laid out
        in memory again; the new object uses those of both."""
        joined = object.__new__(NativeCalls)
        joined._calls = [*self._calls, *other._calls]
        joined._arguments = (self._arguments, other._arguments)
        joined._table = np.concatenate((self._table, other._table))
        joined._runner, joined._table_at = self._runner, joined._table.ctypes.data
        return joined

    def run(self, ticks: npt.NDArray[np.int64] | None = None) -> None:
        """Makes all calls of the list, in order. If a call fails, stops and repeats this call from Python, which raises the
        kernel's exception. Raises RuntimeError if the repeated call succeeds.

        ticks: [calls + 1], filled with the processor's clock before the first call and after each call; None: calls are not
        timed."""
        num_calls = len(self._calls)
        made = self._runner(self._table_at, num_calls, 0 if ticks is None else ticks.ctypes.data)
        if made < num_calls:
            overload, args = self._calls[made]
            overload.entry_point(*args)
            raise RuntimeError(f"{overload.fndesc.qualname} failed once and then did not")


def _code(overload: Any) -> int:
    address: int = overload.library.get_pointer_to_function(overload.fndesc.llvm_func_name)
    return address


def _forms(overload: Any) -> list[str]:
    """Returns the form of each argument of a compiled kernel, which says how `_words` converts it to 64-bit words: "array", "float"
    or "whole" (a whole number or a bool). Raises TypeError for arguments of other types."""
    forms = []
    for kind in overload.signature.args:
        if isinstance(kind, numba.types.Array):
            forms.append("array")
        elif kind == numba.float64:
            forms.append("float")
        elif isinstance(kind, numba.types.Integer | numba.types.Boolean):
            forms.append("whole")
        else:
            raise TypeError(f"{overload.fndesc.qualname} takes {kind}, which has no place among words")
    return forms


def _words(forms: Sequence[str], args: Sequence[Any]) -> list[int]:
    """Returns a call's arguments as 64-bit words, in the form in which Numba passes them: one word for a number, several for an
    array. forms: the form of each argument ("array", "float" or "whole")."""
    words: list[int] = []
    for arg, form in zip(args, forms, strict=True):
        if form == "array":
            # the first two are owner and parent object: none, because nothing counts references here
            words += (0, 0, arg.size, arg.itemsize, arg.__array_interface__["data"][0], *arg.shape, *arg.strides)
        elif form == "float":
            words.append(int(np.float64(arg).view(np.int64)))
        else:
            words.append(int(arg))
    return words


def prepare(signatures: Sequence[tuple[Any, ...]]) -> None:
    """Compiles the small functions that call kernels with these argument types from words in memory, except for those that exist
    already. For all kernels of entry.py this takes 60 ms. signatures: for each kernel, Numba's types of its arguments."""
    with _preparing:
        _runner()
        missing = [kinds for kinds in dict.fromkeys(signatures) if kinds not in _unpackers]
        if missing:
            module = ir.Module()
            for number, kinds in enumerate(missing):
                _write_unpacker(ir.Function(module, _CALL, f"call{number}"), kinds)
            _unpackers.update(zip(missing, _addresses(module), strict=True))


def _write_unpacker(function: ir.Function, kinds: tuple[Any, ...]) -> None:
    """Generates the body of `function`, which calls a kernel. It takes the kernel's address and a pointer to the arguments as
    words, and returns the kernel's status (0: it succeeded). kinds: Numba's types of the arguments."""
    kernel_type = cpu_target.target_context.call_conv.get_function_type(numba.types.none, kinds)
    builder = ir.IRBuilder(function.append_basic_block())
    kernel = builder.inttoptr(function.args[0], kernel_type.as_pointer())
    # the first two are where a result and an exception would go
    values: list[Any] = [builder.alloca(one.pointee) for one in kernel_type.args[:2]]
    for at, kind in enumerate(kernel_type.args[2:]):
        word = builder.load(builder.gep(function.args[1], [ir.Constant(_I64, at)]))
        if isinstance(kind, ir.PointerType):
            word = builder.inttoptr(word, kind)
        elif isinstance(kind, ir.DoubleType):
            word = builder.bitcast(word, kind)
        elif kind != _I64:
            word = builder.trunc(word, kind)
        values.append(word)
    builder.ret(builder.call(kernel, values))


@cache
def _runner() -> Any:
    """Compiles and returns the function that makes all calls of a NativeCalls.

    The function takes (address of the table of calls, number of calls, address of the ticks or 0), and returns the number of calls
    that succeeded: all, or those before the first one that failed."""
    function = ir.Function(ir.Module(), ir.FunctionType(_I64, [_I64.as_pointer(), _I64, _I64.as_pointer()]), "run")
    table, num_calls, ticks = function.args
    names = ("begin", "next", "call", "well", "tick", "done")
    begin, following, calling, well, ticking, done = (function.append_basic_block(name) for name in names)
    builder = ir.IRBuilder(begin)
    clock = ir.Function(function.module, ir.FunctionType(_I64, []), "llvm.readcyclecounter")
    timed = builder.icmp_unsigned("!=", builder.ptrtoint(ticks, _I64), ir.Constant(_I64, 0))
    builder.cbranch(timed, ticking, following)

    builder.position_at_end(following)
    at = builder.phi(_I64)
    builder.cbranch(builder.icmp_unsigned("<", at, num_calls), calling, done)

    builder.position_at_end(calling)
    entry = builder.gep(table, [builder.mul(at, ir.Constant(_I64, _ENTRY_WORDS))])
    unpacker, kernel, words = (builder.load(builder.gep(entry, [ir.Constant(_I64, n)])) for n in range(_ENTRY_WORDS))
    arguments = builder.inttoptr(words, _I64.as_pointer())
    status = builder.call(builder.inttoptr(unpacker, _CALL.as_pointer()), [kernel, arguments])
    builder.cbranch(builder.icmp_unsigned("==", status, ir.Constant(_I32, 0)), well, done)

    builder.position_at_end(well)
    made = builder.add(at, ir.Constant(_I64, 1))
    builder.cbranch(timed, ticking, following)

    builder.position_at_end(ticking)
    ticked = builder.phi(_I64)
    builder.store(builder.call(clock, []), builder.gep(ticks, [ticked]))
    builder.branch(following)

    for phi, block, value in (
        (at, begin, ir.Constant(_I64, 0)),
        (at, well, made),
        (at, ticking, ticked),
        (ticked, begin, ir.Constant(_I64, 0)),
        (ticked, well, made),
    ):
        phi.add_incoming(value, block)
    builder.position_at_end(done)
    builder.ret(at)
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(_addresses(function.module)[0])


def _addresses(module: ir.Module) -> list[int]:
    """Compiles an LLVM module, and returns the addresses of its functions' machine code, in the module's order. The machine code is
    kept until the process ends."""
    module.triple = llvmlite.binding.get_process_triple()
    machine = llvmlite.binding.Target.from_default_triple().create_target_machine(opt=1)
    engine = llvmlite.binding.create_mcjit_compiler(llvmlite.binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    _alive.append(engine)
    return [engine.get_function_address(function.name) for function in module.functions if function.blocks]
