"""Chooses the folder where Numba keeps compiled kernels, and finds the machine code of kernels, so that it can be called without
checking the arguments' types again."""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import importlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from engine.host import processor

log = logging.getLogger("engine")


def keep_in(cache_dir: str) -> None:
    """Sets the folder below cache_dir where Numba keeps compiled kernels. Must be called before a kernel is imported.

    cache_dir: "" for the user's own cache. The folder's name contains a digest of all kernels' sources, because Numba itself only
    checks the file that defines a kernel. If the folder cannot be written, or is full, a warning is logged and the next process
    compiles the kernels again."""
    digest = hashlib.blake2b(digest_size=6)
    engine = Path(__file__).parent.parent
    for source in sorted([*engine.glob("cpu/kernels/*.py"), *engine.glob("host/*_kernels.py")]):
        digest.update(source.read_bytes())
    base = Path(cache_dir).absolute() if cache_dir else Path.home() / ".cache" / "hearthd"  # compilers run in another folder
    keep_in_folder(writable(str(base / f"numba-{digest.hexdigest()}")))


def keep_in_folder(folder: str) -> None:
    """Makes Numba keep compiled kernels in exactly this folder. It is for processes that compile kernels for another process: that
    process has chosen the folder with keep_in and passed it on."""
    import numba

    _compile_for_this_processor()
    numba.config.CACHE_DIR = folder
    _save_one_at_a_time()


def folder() -> str:
    """Returns the folder where compiled kernels are kept, which keep_in or keep_in_folder must have set before."""
    import numba

    return str(numba.config.CACHE_DIR)


def alone(what: str) -> AbstractContextManager[Any]:
    """Waits until no other process with the same cache folder is in a block named `what`, and returns the context manager of the
    block: others wait until it is left."""
    os.makedirs(folder(), exist_ok=True)
    lock = open(os.path.join(folder(), f"lock-{what}"), "w")  # noqa: SIM115  # the file is the context
    fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
    return lock


def _compile_for_this_processor() -> None:
    """Makes Numba compile without the processor features that HEARTHD_CPU_FEATURES removes. Kernels compiled for other features are
    separate files of the same cache folder."""
    import llvmlite.binding
    import numba

    target = processor.llvm_target(processor.this_processor(), llvmlite.binding.get_host_cpu_features())
    if target is not None:
        numba.config.CPU_NAME, numba.config.CPU_FEATURES = target


def use_threading_layer() -> None:
    """Sets the library that runs Numba's parallel kernels in threads (see threading_layer). Must be called before a kernel is
    called."""
    import numba

    numba.config.THREADING_LAYER = threading_layer()


def threading_layer() -> str:
    """Returns the name of the library that is to run Numba's parallel kernels in threads: "omp" (OpenMP) where the system has
    libgomp, because it shares the machine best with torch's own threads; elsewhere "workqueue", Numba's own."""
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return "workqueue"
    return "omp"


@functools.cache
def writable(folder: str, room_bytes: int = 0) -> str:
    """Returns a folder in which files can be written: the given one, which is created if it is missing, if it has room for
    room_bytes bytes; otherwise a temporary folder that is deleted when this process ends, after a warning in the log."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            if room_bytes:
                os.posix_fallocate(probe.fileno(), 0, room_bytes)
    except OSError as error:
        instead = tempfile.mkdtemp(prefix="hearthd-kernels-")
        atexit.register(shutil.rmtree, instead, ignore_errors=True)
        log.warning("%s: %s: compiled kernels go to %s, and are compiled again next time", folder, error.strerror, instead)
        return instead
    return folder


@functools.cache
def _save_one_at_a_time() -> None:
    """Changes Numba so that, of all processes with this cache folder, only one at a time saves a compiled kernel, and that an error
    in saving is only logged as a warning.

    Numba reads a function's index of the signatures that it was compiled for, adds one and writes the index. If two processes that
    compile a function for two signatures do this at the same time, one of the two is lost, or both get the same file. Errors of the
    disk would otherwise be raised by the kernel's first call or by the import of its module, although the kernel is already
    usable."""
    from numba.core.caching import Cache

    save = Cache.save_overload

    def save_or_warn(cache: Any, signature: Any, data: Any) -> None:
        try:
            with alone("saving"):
                save(cache, signature, data)
        except OSError as error:
            log.warning("%s: %s: a kernel is compiled again next time", cache.cache_path, error.strerror)

    Cache.save_overload = save_or_warn


_found: dict[tuple[Any, ...], Any] = {}  # (kernel, `_kind` of each argument) -> the kernel's compilation for them


def compilation(kernel: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Returns what Numba has compiled of the kernel for arguments of these types (a CompileResult, with the machine code), or None
    if nothing. If the kernel has several variants, its method `due` picks the one for these arguments."""
    due = getattr(kernel, "due", None)
    form = kernel if due is None else due(args)
    overloads = getattr(form, "overloads", None)
    if overloads is None:
        return None
    key = form, *map(_kind, args)
    found = _found.get(key)
    if found is None:
        import numba

        found = overloads.get(tuple(numba.typeof(arg) for arg in args))  # takes 7 us for each array
        if found is not None:
            _found[key] = found
    return found


def _kind(arg: Any) -> Any:
    """Returns a key for the type of an argument. Arguments with the same key have the same Numba type."""
    if isinstance(arg, np.ndarray):
        flags = arg.flags
        return arg.dtype, arg.ndim, flags.c_contiguous, flags.f_contiguous, flags.aligned, flags.writeable
    return type(arg)


def direct(kernel: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """Returns the function that a call of the kernel with these arguments ends up in: machine code, entered without Numba's check
    of the argument types (about 1 us). If the kernel is not compiled for them, returns the kernel itself, or its variant for these
    arguments if its method `due` picks one."""
    found = compilation(kernel, args)
    if found is not None:
        entry: Callable[..., Any] = found.entry_point
        return entry
    due = getattr(kernel, "due", None)
    form: Callable[..., Any] = kernel if due is None else due(args)
    return form
