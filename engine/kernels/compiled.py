"""Where Numba keeps what it has compiled, and how that is called without looking at the arguments again."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from config import processor

log = logging.getLogger("engine")


def keep_in(cache_dir: str) -> None:
    """To be called before a kernel is imported. cache_dir: "" for the user's own. The folder's name has a digest of the kernels'
    sources in it, because Numba looks only at the file of the kernel itself. A folder that takes nothing, or nothing more, costs a
    warning and the time to compile again."""
    digest = hashlib.blake2b(digest_size=6)
    for source in sorted(Path(__file__).parent.glob("cpu*.py")):
        digest.update(source.read_bytes())
    base = Path(cache_dir) if cache_dir else Path.home() / ".cache" / "hearthd"
    keep_in_folder(writable(str(base / f"numba-{digest.hexdigest()}")))


def keep_in_folder(folder: str) -> None:
    """As keep_in, in the very folder that another process (`folder`) has found."""
    import numba

    _compile_for_this_processor()
    numba.config.CACHE_DIR = folder
    _forgive_failed_saves()


def folder() -> str:
    """Where kernels are kept, after keep_in."""
    import numba

    return str(numba.config.CACHE_DIR)


def kernels_dtype(dtype: str) -> str:
    """float16 has no kernels of its own; rows whose logits are edited are sampled in float32."""
    return "float32" if dtype == "float16" else dtype


def _compile_for_this_processor() -> None:
    """Has Numba use no feature that was taken away. Kernels for other features are other files of the same cache."""
    import llvmlite.binding
    import numba

    target = processor.llvm_target(processor.this_processor(), llvmlite.binding.get_host_cpu_features())
    if target is not None:
        numba.config.CPU_NAME, numba.config.CPU_FEATURES = target


def use_threading_layer() -> None:
    """To be called before a kernel is."""
    import numba

    numba.config.THREADING_LAYER = threading_layer()


def threading_layer() -> str:
    """For Numba: OpenMP's where the system has libgomp, which shares the machine best with torch's own threads. Its queue
    otherwise."""
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return "workqueue"
    return "omp"


@functools.cache
def writable(folder: str, room_bytes: int = 0) -> str:
    """The folder, made if it is not there, or a temporary one if files can't be written to it, or not that many bytes."""
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
def _forgive_failed_saves() -> None:
    """What is compiled is in use before Numba saves it; by itself it raises what the disk says to that, out of the kernel's first
    call or of its module."""
    from numba.core.caching import Cache

    save = Cache.save_overload

    def save_or_warn(cache: Any, signature: Any, data: Any) -> None:
        try:
            save(cache, signature, data)
        except OSError as error:
            log.warning("%s: %s: a kernel is compiled again next time", cache.cache_path, error.strerror)

    Cache.save_overload = save_or_warn


_found: dict[tuple[Any, ...], Any] = {}  # kernel, then what `_kind` says of each argument -> its compilation


def compilation(kernel: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What Numba has made of the kernel (of its forms, `due`, the one) for arguments of these types. None: nothing."""
    due = getattr(kernel, "due", None)
    form = kernel if due is None else due(args)
    overloads = getattr(form, "overloads", None)
    if overloads is None:
        return None
    key = form, *map(_kind, args)
    found = _found.get(key)
    if found is None:
        import numba

        found = overloads.get(tuple(numba.typeof(arg) for arg in args))  # 7 us an array
        if found is not None:
            _found[key] = found
    return found


def _kind(arg: Any) -> Any:
    """What Numba's type of it follows from."""
    if isinstance(arg, np.ndarray):
        flags = arg.flags
        return arg.dtype, arg.ndim, flags.c_contiguous, flags.f_contiguous, flags.aligned, flags.writeable
    return type(arg)


def direct(kernel: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """What a call of the kernel comes to as long as its arguments are these: machine code, entered past Numba's choice between
    types (about 1 us). The kernel itself, or its form, where that is not compiled."""
    found = compilation(kernel, args)
    if found is not None:
        entry: Callable[..., Any] = found.entry_point
        return entry
    due = getattr(kernel, "due", None)
    form: Callable[..., Any] = kernel if due is None else due(args)
    return form
