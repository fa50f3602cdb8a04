"""Chooses the folder in which Numba keeps compiled kernels. Also finds the machine code of compiled kernels, so that it can be
called without Numba's check of the arguments' types."""

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
    """Makes Numba keep compiled kernels in a folder below cache_dir. Must be called before a kernel is imported.

    cache_dir: "": the user's own cache. The folder's name contains a digest of all kernels' sources, because Numba itself checks
    only the file that defines a kernel, not the files that it imports. If the folder cannot be written, kernels are kept in a
    temporary folder until this process ends; if its disk is full, they are not kept. Both log a warning, and the next process
    compiles the kernels again."""
    digest = hashlib.blake2b(digest_size=6)
    engine = Path(__file__).parent.parent
    for source in sorted([*engine.glob("cpu/kernels/*.py"), *engine.glob("host/*_kernels.py")]):
        digest.update(source.read_bytes())
    base = Path(cache_dir).absolute() if cache_dir else Path.home() / ".cache" / "hearthd"  # compilers run in another folder
    keep_in_folder(writable(str(base / f"numba-{digest.hexdigest()}")))


def keep_in_folder(folder: str) -> None:
    """Makes Numba keep compiled kernels in exactly this folder. It is called in processes that compile kernels for another process,
    which has chosen the folder by keep_in."""
    import numba

    _compile_for_this_processor()
    numba.config.CACHE_DIR = folder
    _save_one_at_a_time()


def folder() -> str:
    """Returns the folder in which compiled kernels are kept. keep_in or keep_in_folder must have been called before."""
    import numba

    return str(numba.config.CACHE_DIR)


def alone(what: str) -> AbstractContextManager[Any]:
    """Waits until no other process with the same cache folder is in a block that was entered as alone(what), and returns the
    context manager of such a block. Other processes wait until the block is left. what: a name, such as that of a kernel to be
    compiled."""
    os.makedirs(folder(), exist_ok=True)
    lock = open(os.path.join(folder(), f"lock-{what}"), "w")  # noqa: SIM115  # the file is the context
    fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
    return lock


def _compile_for_this_processor() -> None:
    """Makes Numba compile without the processor features that HEARTHD_CPU_FEATURES removes. Kernels compiled with other features
    are kept as separate files in the same cache folder."""
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
    """Returns the name of the library that runs Numba's parallel kernels in threads: "omp" (OpenMP) if the system has libgomp,
    which shares the cores best with torch's own threads; else "workqueue", Numba's own."""
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return "workqueue"
    return "omp"


@functools.cache
def writable(folder: str, room_bytes: int = 0) -> str:
    """Returns `folder` if files can be written in it and it has room for room_bytes bytes; creates it if it is missing. Otherwise
    logs a warning and returns a temporary folder, which is deleted when this process ends."""
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
    """Changes how Numba saves a compiled kernel: only one at a time of all processes with this cache folder saves, and an error of
    the disk is only logged as a warning.

    To save a kernel, Numba reads the function's index of signatures, adds one and writes the index. If two processes did this at
    the same time, one of their signatures could be lost, or both could get the same file. An error of the disk would otherwise be
    raised by the first call of the kernel or by the import of its module, although the compiled kernel can be used."""
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
    """Returns Numba's compilation of a kernel for arguments of these types (a CompileResult, with the machine code); None if the
    kernel is not compiled for them. If the kernel has several variants, its method `due` picks the one for these arguments."""
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
    """Returns a function that does the same as the kernel when it is called with arguments of these types, without Numba's check of
    the types (about 1 us): the kernel's machine code. If the kernel is not compiled for these types, returns the kernel itself, or
    the variant that its method `due` picks."""
    found = compilation(kernel, args)
    if found is not None:
        entry: Callable[..., Any] = found.entry_point
        return entry
    due = getattr(kernel, "due", None)
    form: Callable[..., Any] = kernel if due is None else due(args)
    return form
