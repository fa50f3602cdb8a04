"""Makes Numba generate only the code that it saves. This is for processes that compile kernels for other processes and call no
kernel themselves.

Usually Numba makes every function ready to be called from Python and from C: it adds wrappers, and generates machine code for
helpers although it is already part of the kernels that call them, for each of the three layers of a parallel kernel. All of that is
lost when the process ends. Without this code, compiling takes a quarter less time. It takes another tenth less if Python's garbage
collector runs less often than after every 700 objects."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import ModuleType
from typing import Any

TESTED = ("0.68.",)


def make_only_what_is_saved(modules: Iterable[ModuleType]) -> None:
    """Changes Numba, for the rest of this process, so that it generates only the code that it saves. Functions compiled from now on
    must not be called in this process. modules: the modules that define the kernels (functions that Numba caches) and their
    helpers. Does nothing if this was not tested with the installed version of Numba, because it replaces functions that are not
    part of Numba's public interface."""
    import numba

    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    if not numba.__version__.startswith(TESTED):
        return
    from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
    from numba.core.registry import cpu_target

    cpu_target.target_context  # noqa: B018  # makes and calls code of Numba itself, once
    for module in modules:
        for one in vars(module).values():
            _leave_out_wrappers(one)
    add, emit, serialize = JITCPUCodegen._add_module, JITCodeLibrary._finalize_specific, JITCodeLibrary.serialize_using_object_code

    def emit_what_is_there(library: Any) -> None:
        if library._object_caching_enabled and library._compiled_object is not None:  # it was found in the cache folder
            add(library.codegen, library._final_module)
            emit(library)

    def emit_and_serialize(library: Any) -> Any:
        library._ensure_finalized()
        add(library.codegen, library._final_module)
        emit(library)
        return serialize(library)

    JITCPUCodegen._add_module = lambda codegen, module: None
    JITCPUCodegen.set_env = lambda codegen, name, environment: None  # would set a variable in machine code that was not generated
    JITCodeLibrary._finalize_specific = emit_what_is_there
    JITCodeLibrary.serialize_using_object_code = emit_and_serialize


def _leave_out_wrappers(function: Any) -> None:
    from numba.core.caching import NullCache
    from numba.core.dispatcher import Dispatcher

    if isinstance(function, Dispatcher):
        function.targetoptions["no_cfunc_wrapper"] = True
        if isinstance(vars(function)["_cache"], NullCache):  # a helper, which only kernels call
            function.targetoptions["no_cpython_wrapper"] = True
