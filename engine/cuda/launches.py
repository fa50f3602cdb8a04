"""Records which Triton kernels are launched, and under which keys Triton would compile them, without compiling or running any. It
needs no GPU.

Triton compiles a kernel once for each key: its constexprs, the types of its arguments, which integers are 1 or multiples of 16,
which pointers are aligned to 16 bytes, and the options. Launches with the same keys therefore need the same compilations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

WARP_THREADS = 32


class NoGpu:
    """A replacement for Triton's driver where there is no GPU, with the methods that compiling needs. capability: compute
    capability of the GPU to compile for, 90 for 9.0."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, WARP_THREADS)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(slots=True, frozen=True)
class Launch:
    """A recorded launch of a Triton kernel, with its arguments and options. key: Triton's key of the compiled kernel; launches with
    the same key share it."""

    kernel: Any
    key: str
    args: tuple[Any, ...]
    grid: Any
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def compile(self) -> Any:
        """Compiles the kernel for this launch, or finds it in Triton's cache folder. Returns Triton's CompiledKernel."""
        return self.kernel.run(*self.args, grid=self.grid, warmup=True, **self.options)


def _seen_as(argument: Any) -> Any:
    """Returns everything about an argument of a kernel on which Triton's key may depend: the dtype and the address modulo 16 of a
    tensor; the type and the value of anything else."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    return type(argument), argument


@contextmanager
def recorded(capability: int) -> Iterator[dict[str, Launch]]:
    """Returns a context in which launches of Triton kernels are recorded instead of compiled and run, so that their results are
    undefined. The context yields a dict by key, which receives the first launch of each key, in order. From then on this process
    compiles for a GPU of this compute capability (90 for 9.0), whatever GPU it has.

    Raises RuntimeError at a launch for which Triton does not report a key, and if kernels are interpreted."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("interpreted kernels have no keys")
    launches: dict[str, Launch] = {}
    told: list[str] = []
    seen: set[tuple[Any, ...]] = set()  # launches that have been recorded, by something at least as fine as their keys

    def hook(*, key: str, fn: Any, **_: Any) -> bool:
        told.append(f"{fn.module}.{fn.name}: {key}")
        return True  # Triton then neither compiles nor launches the kernel

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen_as = (kernel, *options.items(), *map(_seen_as, args))
        if seen_as in seen:  # a check that is a hundred times faster than asking Triton
            return
        told.clear()
        given = dict(options)
        own_run(kernel, *args, grid=grid, warmup=warmup, **options)
        if len(told) != 1:
            raise RuntimeError(f"Triton {triton.__version__} tells no key of {kernel.fn.__name__}, or has compiled it already")
        launches.setdefault(told[0], Launch(kernel, told[0], args, grid, given))
        seen.add(seen_as)

    triton.runtime.driver.set_active(NoGpu(capability))
    own_run, own_hook = JITFunction.run, triton.knobs.runtime.jit_cache_hook
    JITFunction.run, triton.knobs.runtime.jit_cache_hook = run, hook
    try:
        yield launches
    finally:
        JITFunction.run, triton.knobs.runtime.jit_cache_hook = own_run, own_hook
