"""A stand-in for torch and its tensors on a device of engine.races.device: as much of them as engine/cuda uses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.engine.races.device import Access, Device, Event, Graph, Storage, Stream

CUDA, HOST = SimpleNamespace(type="cuda", index=0), SimpleNamespace(type="cpu", index=None)


class Tensor:
    """A tensor without values, but for what the host writes to it or copies from there. storage: its block, of which it stands for
    all. None: it stands for its own bytes at an address."""

    def __init__(
        self, on: Device, shape: Sequence[int], dtype: Any, device: Any, storage: Storage | None = None, address: int = 0
    ) -> None:
        self.on, self.shape, self.dtype, self.device = on, tuple(shape), dtype, device
        self.storage, self.address = storage, address
        self.is_cuda = device is CUDA
        self.values: Any = None

    @property
    def place(self) -> Any:
        if self.storage is not None:
            return (self.storage.block, self.storage.block.number)
        return (self.address, self.num_bytes)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.num_bytes

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        return math.prod(self.shape)

    def data_ptr(self) -> int:
        return self.address if self.storage is None else self.storage.block.address + self.address

    def _view(self, shape: Sequence[int], dtype: Any, address: int) -> Tensor:
        return Tensor(self.on, shape, dtype, self.device, self.storage, address)

    def __getitem__(self, at: Any) -> Tensor:
        first, rest = (at[0], at[1:]) if isinstance(at, tuple) else (at, ())
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        if isinstance(first, slice):
            begin, end, _ = first.indices(self.shape[0])
            shape = (max(0, end - begin), *self.shape[1:])
        else:
            begin, shape = first, self.shape[1:]
        if len(rest) > 1:  # of one row's rows
            return self[first][rest]
        if rest:  # of columns: all of their rows
            end = rest[0].indices(self.shape[1])[1] if isinstance(rest[0], slice) else 0
            shape = (*shape[:1], end) if isinstance(first, slice) else (end,)
        return self._view(shape, self.dtype, self.address + begin * row_bytes)

    def __setitem__(self, at: Any, value: Any) -> None:
        if self.device is not HOST:
            self.on.launch("store", [reads(value), writes(self)])
        elif self.storage is not None:
            self.on.host_uses(self.storage.block, self.storage.block.what, "the host")

    def view(self, *how: Any) -> Tensor:
        if isinstance(how[0], torch.dtype):
            last = self.shape[-1] * self.dtype.itemsize // how[0].itemsize
            return self._view((*self.shape[:-1], last), how[0], self.address)
        shape = list(how[0] if isinstance(how[0], tuple) else how)
        if -1 in shape:
            shape[shape.index(-1)] = self.numel() // -math.prod(shape)
        return self._view(shape, self.dtype, self.address)

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        self.on.launch("copy of masks" if isinstance(other, Masks) else "copy", [reads(other), writes(self)])
        self.values = None if other.values is None else other.values.copy()
        return self

    def element_size(self) -> int:
        size: int = self.dtype.itemsize
        return size

    def transpose(self, one: int, other: int) -> Tensor:
        shape = list(self.shape)
        shape[one], shape[other] = shape[other], shape[one]
        return self._view(shape, self.dtype, self.address)

    def reshape(self, *shape: int) -> Tensor:
        return self._result("copy", shape, self.dtype)

    def clone(self) -> Tensor:
        return self._result("copy", self.shape, self.dtype)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        shape = (*self.shape[:dim], len(rows), *self.shape[dim + 1 :])
        return self._result("gather", shape, self.dtype, rows)

    def eq(self, other: Tensor) -> Tensor:
        return self._result("comparison", self.shape, torch.bool, other)

    def cumprod(self, dim: int) -> Tensor:
        return self._result("products", self.shape, torch.int64)

    def sum(self, dim: int) -> Tensor:
        return self._result("sums", self.shape[:dim], torch.int64)

    def __add__(self, other: Tensor) -> Tensor:
        return self._result("sum", self.shape, other.dtype, other)

    def _result(self, what: str, shape: Sequence[int], dtype: Any, *others: Tensor) -> Tensor:
        made = Tensor(self.on, shape, dtype, self.device, self.on.allocate((*shape, dtype), "a result"))
        self.on.launch(what, [reads(self), *map(reads, others), writes(made)])
        return made

    def float(self) -> Tensor:
        made = Tensor(self.on, self.shape, torch.float32, self.device, self.on.allocate((*self.shape, "float32"), "a result"))
        return made.copy_(self)

    def split(self, sizes: Sequence[int]) -> list[Tensor]:
        ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
        return [self[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[at] for at in range(len(self)))

    def zero_(self) -> Tensor:
        if self.storage is not None:
            self.storage.block.value = 0.0
        self.on.launch("zeros", [writes(self)])
        return self

    def item(self) -> float:
        self.cpu()
        return 0.0 if self.storage is None else self.storage.block.value

    def cpu(self) -> Tensor:
        if self.numel():
            self.on.launch("copy to the host", [reads(self)])
        self.on.stream.synchronize()
        return Tensor(self.on, self.shape, self.dtype, HOST)

    def numpy(self) -> Any:
        if self.storage is not None:
            self.on.host_uses(self.storage.block, self.storage.block.what, "the host")
        if self.values is None:
            self.values = np.zeros(self.shape, torch.zeros(0, dtype=self.dtype).numpy().dtype)
        return self.values

    def new_empty(self, *shape: int) -> Tensor:
        return Tensor(self.on, shape, self.dtype, self.device, self.on.allocate(shape, "a result"))


class Masks(Tensor):
    """Page-locked masks in memory that another process writes. A copy is taken to read those alone that the step in progress points
    at: what it copies of others, which may be written meanwhile, nobody reads."""

    @property
    def place(self) -> Any:
        return "masks"


def reads(tensor: Tensor) -> Access:
    return tensor.place, False


def writes(tensor: Tensor) -> Access:
    return tensor.place, True


class Drawn:
    """Values on the host that are copied to the device."""

    def __init__(self, on: Device, shape: tuple[int, ...]) -> None:
        self._on, self._shape = on, shape

    def to(self, device: Any, dtype: Any = torch.float32) -> Tensor:
        return Torch(self._on).zeros(*self._shape, dtype=dtype, device=device)


class Torch:
    """Stands in for the module."""

    def __init__(self, on: Device) -> None:
        self._on = on
        self.cuda = SimpleNamespace(
            Stream=lambda device=None: on.new_stream(),
            Event=lambda enable_timing=False, blocking=False: Event(on, enable_timing),
            CUDAGraph=lambda: Graph(on),
            stream=self._stream,
            default_stream=lambda device=None: on.default_stream,
            current_stream=lambda device=None: on.stream,
            current_device=lambda: 0,
            graph_pool_handle=lambda: len(on.pools) + 1,
            memory_reserved=lambda: 0,
            empty_cache=on.empty_cache,
            get_device_properties=lambda device: SimpleNamespace(multi_processor_count=2),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        streams = self._on.schedule.host.streams
        streams.append(stream)
        try:
            yield
        finally:
            streams.pop()

    def device(self, kind: str, index: int) -> Any:
        return CUDA

    def from_numpy(self, values: Any) -> Any:
        """Returns page-locked masks, and anything else as it is."""
        address = values.ctypes.data
        if not self._on.is_registered(address, values.nbytes):
            return values
        return Masks(self._on, values.shape, torch.int32, HOST, None, address)

    def equal(self, one: Any, other: Any) -> bool:
        return True

    def as_tensor(self, held: Any, device: Any) -> Tensor:
        told = held.__cuda_array_interface__
        return Tensor(self._on, told["shape"], torch.uint8, CUDA, None, told["data"][0])

    def empty(self, *shape: Any, dtype: Any = torch.float32, device: Any = HOST, pin_memory: bool = False) -> Tensor:
        shape = tuple(shape[0]) if isinstance(shape[0], tuple) else shape
        if device is not CUDA and not pin_memory:
            return Tensor(self._on, shape, dtype, HOST)
        if pin_memory:  # torch gives it out again only when the streams that used it have passed
            return Tensor(self._on, shape, dtype, HOST, self._on.page_locked())
        return Tensor(self._on, shape, dtype, CUDA, self._on.allocate((shape, dtype), "a tensor"))

    def zeros(self, *shape: Any, dtype: Any = torch.float32, device: Any = HOST, pin_memory: bool = False) -> Tensor:
        made = self.empty(*shape, dtype=dtype, device=device, pin_memory=pin_memory)
        return made.zero_() if made.is_cuda else made

    def full(self, shape: Any, value: float, dtype: Any = torch.float32, device: Any = HOST) -> Tensor:
        made = self.zeros(tuple(shape), dtype=dtype, device=device)
        if made.storage is not None:
            made.storage.block.value = float(value)
        return made

    def randn(self, *shape: int, device: Any = HOST, generator: Any = None) -> Any:
        if device is CUDA and generator is None:
            self._on.draw()
        return Drawn(self._on, shape)

    def index_select(self, x: Tensor, dim: int, rows: Tensor, out: Tensor) -> Tensor:
        self._on.launch("picked rows", [reads(x), reads(rows), writes(out)])
        return out

    def mm(self, one: Tensor, other: Tensor) -> Tensor:
        return self.linear(one, other)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = x.new_empty(x.shape[0], weight.shape[0])
        self._on.product("a product", [reads(x), reads(weight), writes(out)])
        return out
