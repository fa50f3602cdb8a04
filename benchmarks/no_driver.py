"""Runs the host code of a GPU's steps where there is no GPU: against a driver whose calls do nothing. What is measured so is what
the engine, torch's dispatcher and Triton's launchers do on the host for a step. It goes by the internals of Triton 3.9.

Real are engine/cuda from `launch` to the kernels' grids and arguments, Triton's own way from a kernel's call to cuLaunchKernelEx
(its binder, its key, its launcher in C), and torch's allocations, views, copies and indices, on tensors of the host. Stood in for
are:

- libcuda: a library of functions that return success (LIBCUDA, compiled with `cc`); it counts launches
- compiled kernels: the launcher of each is made, its code is not
- products and the embedding: torch is called, for one number, and the result is allocated; cuBLAS's choice of a kernel is missing
- picked hidden states: torch is called, for one number
- large copies between the host and the device, which a GPU's copy engines make: torch is called, for one number
- events, page-locked memory and graphs: a replay is one call that does nothing
- the neighbours of a pipeline's stage: states are there whenever it asks for them, and nobody reads what it sends
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.compiler import CompiledKernel

from engine.cuda import copies, edited, edited_graphs, edited_logits, graphs, mixed_graphs, model, sequences, share, stages
from engine.cuda.kernels import entry
from engine.cuda.launch_only import ARENA_BLOCKS, AddressRange
from engine.cuda.launches import NoGpu
from engine.cuda.model import CudaModel
from engine.cuda.ops import CudaOps
from engine.cuda.share import CudaShare, ShareLinks
from engine.cuda.stages import DeviceStages
from engine.host.rank_memory import LINE_BYTES
from engine.host.stage_memory import piece_bytes, stage_memory_bytes
from engine.memory.stage_link import StageLink
from engine.ops.ops import Matrix, PackedMatrix
from engine.protocol import LoadModel
from loader.shapes import kv_layout
from loader.shapes.model_shape import ModelShape
from loader.sizes.layout import weights_bytes
from loader.sizes.work_space import MOST_STAGED_TOKENS, handed_bytes

CAPABILITY = 90
# Functions that the launcher calls for each launch, and those that it is linked with. An output that a caller reads is set.
LIBCUDA = """
typedef int R; typedef unsigned long long P;
long num_launches;
R cuCtxGetCurrent(void **context) { *context = &num_launches; return 0; }
R cuLaunchKernelEx(void *config, void *function, void **args, void **extra) { num_launches++; return 0; }
R cuPointerGetAttribute(P *data, int attribute, P pointer) { *data = pointer; return 0; }
R cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1 << 18; return 0; }
#define S(name) R name() { return 0; }
S(cuCtxGetDevice) S(cuCtxGetLimit) S(cuCtxSetCurrent) S(cuCtxSetLimit) S(cuDeviceGet) S(cuDeviceGetCount)
S(cuDevicePrimaryCtxRetain) S(cuDriverGetVersion) S(cuFuncGetAttribute) S(cuFuncSetAttribute) S(cuFuncSetCacheConfig)
S(cuGetErrorString) S(cuGetProcAddress) S(cuInit) S(cuModuleGetFunction) S(cuModuleLoadData) S(cuModuleUnload)
S(cuOccupancyMaxActiveClusters) S(cuPointerGetAttributes) S(cuStreamIsCapturing) S(cuTensorMapEncodeIm2col)
S(cuTensorMapEncodeTiled)
"""
LARGE_BYTES = 16 << 10  # of a copy; torch goes by the columns that are in a smaller one
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h

_one, _first, _zero = torch.ones(1, 1), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
_copy = Tensor.copy_
_state = torch.ones(1, 1, dtype=torch.bfloat16)


class NoDriver(NoGpu):
    """Triton's driver of a GPU, over a libcuda that does nothing. Raises OSError or CalledProcessError where that cannot be
    compiled."""

    launcher_cls = CudaLauncher

    def __init__(self) -> None:
        super().__init__(CAPABILITY)
        self._folder = tempfile.TemporaryDirectory(prefix="hearth-no-driver-")
        folder = Path(self._folder.name)
        source, library = folder / "libcuda.c", folder / "libcuda.so.1"
        source.write_text(LIBCUDA)
        options = ["-O2", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["cc", *options, "-o", str(library), str(source)], check=True)
        # found by its name from now on, whoever asks for libcuda.so.1
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._count = ctypes.c_long.in_dll(self._library, "num_launches")
        triton.knobs.nvidia.libcuda_path = str(folder)
        triton.knobs.cache.dir = str(folder / "triton")
        triton.runtime.driver.set_active(self)
        self.utils = CudaUtils()

    @property
    def num_launches(self) -> int:
        """Returns how many kernels were launched so far."""
        return self._count.value


class NoCode(CompiledKernel):
    """A compiled kernel without code, with Triton's own launcher."""

    def __init__(self, source: Any, options: dict[str, Any]) -> None:
        scratch = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
        aligned = dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
        metadata = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=False, num_ctas=1, **scratch, **aligned)
        metadata.instrumentation_mode = options.get("instrumentation_mode", "")
        metadata.num_warps, metadata.shared = options["num_warps"], 0
        self.src, self.metadata, self.name = source, metadata, source.name
        self.module, self._module_pid, self.function = 1, None, 1  # as if it were loaded, and nothing to unload
        self.packed_metadata = (metadata.num_warps, metadata.num_ctas, metadata.shared)
        self._run = CudaLauncher(source, metadata)


def _without_code(source: Any, target: Any = None, options: Any = None, **_: Any) -> NoCode:
    return NoCode(source, options)


class _Event:
    def record(self, stream: Any = None) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


class _Graph:
    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        """Does nothing: what runs until the end of the capture runs as it would without one."""

    def capture_end(self) -> None:
        """Does nothing."""

    def replay(self) -> None:
        """Does nothing."""


class _Torch:
    """torch, whose cuda device is the host."""

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(
            CUDAGraph=_Graph,
            Event=lambda enable_timing=False, blocking=False: _Event(),
            Stream=SimpleNamespace,
            stream=lambda stream: nullcontext(),
            default_stream=lambda device: _Event(),
            current_stream=lambda: None,
            graph_pool_handle=lambda: (0, 1),
            memory_reserved=lambda: 0,
            empty_cache=lambda: None,
            get_device_properties=lambda device: SimpleNamespace(multi_processor_count=132),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, dtype: Any = None, device: Any = None, pin_memory: bool = False) -> Tensor:
        return (torch.zeros if pin_memory else torch.empty)(*shape, dtype=dtype)  # not all copies are made

    def index_select(self, x: Tensor, dim: int, rows: Tensor, out: Tensor) -> Tensor:
        return torch.index_select(_state, 0, _first, out=out[:1, :1])

    def zeros(self, *shape: Any, dtype: Any = None, device: Any = None, pin_memory: bool = False) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)


def _copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not non_blocking or source.nbytes < LARGE_BYTES:
        return _copy(self, source, non_blocking)
    _copy(_first, _zero, True)
    return self


class NoDriverOps(CudaOps):
    """Operations that launch the kernels of a step and read no weights."""

    def __init__(self) -> None:
        """Leaves Triton's cache folder as it is."""

    def embedding(self, ids: Tensor, weight: Tensor | PackedMatrix, scale: float = 1.0, first: int | None = None) -> Tensor:
        assert isinstance(weight, Tensor)
        functional.linear(_one, _one)
        return weight.new_empty(len(ids), weight.shape[1])

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        assert isinstance(weight, Tensor)
        functional.linear(_one, _one)
        return x.new_empty(x.shape[0], weight.shape[0])

    def linear_float32(self, x: Tensor, weight: Tensor) -> Tensor:
        functional.linear(_one, _one)
        return weight.new_empty(x.shape[0], weight.shape[0])


def install() -> NoDriver:
    """Makes the driver that does nothing this process's, for good. Raises RuntimeError where kernels are interpreted, and as
    NoDriver does."""
    if entry.INTERPRETED:
        raise RuntimeError("interpreted kernels are not launched")
    driver = NoDriver()
    # torch's cache of device memory gives blocks out without a system call, and so shall the host's allocator
    libc = ctypes.CDLL(None)
    for option, value in ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 1 << 30)):
        libc.mallopt(option, value)
    triton.compiler.compile = _without_code
    Tensor.copy_ = _copied  # type: ignore[method-assign, assignment]
    for module in (copies, edited, edited_graphs, edited_logits, graphs, mixed_graphs, model, sequences, share, stages):
        vars(module)["torch"] = _Torch()
    return driver


def no_driver_model(spec: LoadModel, shape: ModelShape, block_tokens: int, max_graph_rows: int, max_graph_tokens: int) -> CudaModel:
    """Returns a model, or a stage of one, whose steps do on the host what they do on a GPU's. spec: of it the dtypes and the limits
    count."""
    groups = kv_layout.kv_groups(shape, spec.kv_dtype, block_tokens)
    arena = AddressRange(ARENA_BLOCKS * max(group.block_bytes for group in groups))
    weights: Any = AddressRange(weights_bytes(shape, spec.dtype))
    parts, limits = (NoDriverOps(), spec, shape, weights, arena.all, block_tokens), (max_graph_rows, max_graph_tokens)
    made = CudaModel(*parts, *limits) if shape.split is None else CudaShare(*parts, _stage_links(shape, spec.dtype), *limits)
    made._device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    made._staging._pinned = made._edited.staging._pinned = True
    made._products = []  # no kernel is the faster one
    return made


def _stage_links(shape: ModelShape, dtype: str) -> ShareLinks:
    """Returns the connection of a stage of one device to stages that have sent more than any benchmark takes."""
    assert shape.split is not None
    stage, num_stages = shape.split.stage, shape.split.num_stages
    handed = handed_bytes(shape, dtype, MOST_STAGED_TOKENS)
    memory, broken = np.zeros(stage_memory_bytes(1, num_stages, handed), np.uint8), np.zeros(1, np.int64)
    for piece in memory.reshape(num_stages - 1, piece_bytes(num_stages, handed))[:stage]:
        piece[:LINE_BYTES].view(np.int64)[0] = 1 << 40
    taking, sending = (StageLink(memory, stage, num_stages, handed, broken) for _ in range(2))
    device: Any = SimpleNamespace(type="cuda")
    return ShareLinks(None, DeviceStages(taking, sending, shape.hidden_size, getattr(torch, dtype), device), broken)


def result_of(pending: Any) -> np.ndarray:
    """Returns the ids of a step, which nobody has computed."""
    ids: np.ndarray = pending.wait().ids
    return ids
