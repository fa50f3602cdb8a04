"""Has Triton's interpreter look up once what it looks up at every launch, at every call between kernels' functions and at every
operation: two thirds of the time of the tests that it runs. What it computes stays the same.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from tests import interpreter_operators, interpreter_types


def quicken() -> None:
    """Changes the interpreter of this process, once it has been imported."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and not hasattr(interpreter, "quickened"):
        interpreter.quickened = True  # type: ignore[attr-defined]
        _call_builtins_directly(interpreter)
        _remember_builtins(interpreter)
        _patch_once_a_launch(interpreter)
        _remember_dtypes(interpreter)
        interpreter_types.share(interpreter)


def _call_builtins_directly(interpreter: Any) -> None:
    """Gives an operation the interpreter's semantics without going through its arguments, and without the wrapper that looks for
    them, where it has that wrapper."""
    semantic = interpreter.interpreter_semantic
    wrapper = interpreter.tl.core.builtin(lambda: None).__code__

    @functools.cache
    def interpreted(member: Any) -> Any:
        called = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return called(*args, **options)

        return call

    quick = interpreter_operators.quick(interpreter, interpreted)

    def patch(package: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        if scope:
            scope[0].set_attr(package, name, quick.get(member) or interpreted(member))
        else:
            setattr(package, name, quick.get(member) or interpreted(member))

    interpreter._patch_attr = patch


def _remember_builtins(interpreter: Any) -> None:
    """Keeps the list of a module's operations, which the interpreter replaces by its own. Those that are replaced already are left,
    as the interpreter does it."""

    @functools.cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member)]

    def patch(package: Any, builder: Any, *scope: Any) -> None:
        for name, member in builtins_of(package):
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, builder, *scope)

    interpreter._patch_builtin = patch


def _remember_dtypes(interpreter: Any) -> None:
    """Keeps NumPy's type for each scalar type by its name, instead of a table of all that is made anew for each question."""
    look_up, found = interpreter._get_np_dtype, {}

    def numpy_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, interpreter.tl.pointer_type):
            return look_up(scalar)
        if scalar.name not in found:
            found[scalar.name] = look_up(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = numpy_dtype


def _patch_once_a_launch(interpreter: Any) -> None:
    """Replaces operations once a launch, not again whenever a kernel calls a function of its own or of Triton's library."""
    patch, launch, language = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter.tl
    patched: set[tuple[bool, ...]] = set()  # since the launch began

    @functools.cache
    def seen_by(function: Any) -> tuple[bool, ...]:
        names = list(function.__globals__.values())
        return tuple(any(one is lang for one in names) for lang in (language, language.core))

    def patch_once(function: Any) -> Any:
        seen = seen_by(function)
        if seen in patched:
            return None
        patched.add(seen)
        return patch(function)

    def launch_anew(executor: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        return launch(executor, *args, **options)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew
