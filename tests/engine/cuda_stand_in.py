"""A stand-in for CUDA's virtual memory management, made of memfds, and for the parts of torch that engine/cuda/memory.py
uses. With it calls, their order and their arguments are tested where there is no GPU. It is as strict as the driver's
documentation, or stricter: about alignment, what is mapped where, and what must not be freed yet. Work on its streams is finished
at once.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import os
import sys
import threading
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine.memory import mappings

GRANULARITY = 1 << 16  # 2 MiB on a GPU


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationType(enum.IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemAllocationHandleType(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAccess_flags(enum.IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(enum.IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUdeviceptr(int):
    pass


class CUmemLocation(SimpleNamespace):
    pass


class CUmemAllocationProp(SimpleNamespace):
    requestedHandleTypes = 0


class CUmemAccessDesc(SimpleNamespace):
    pass


class Handle:
    """A physical allocation, as known to one process."""

    def __init__(self, fd: int, num_bytes: int, exportable: bool) -> None:
        self.fd, self.num_bytes, self.exportable, self.released = fd, num_bytes, exportable, False
        self.memory: Any = None  # a test's name for what is allocated


class Refused(Exception):
    """Raised for a call that the driver would refuse with CUDA_ERROR_INVALID_VALUE, so that the test fails."""


class Driver(ModuleType):
    """Stands in for cuda.bindings.driver. limit_bytes: the device's memory. needs_context: whether the calls for memory are refused
    in a thread without a current context. mapped: address -> handle. reserved: address -> bytes."""

    CUresult, CUmemLocationType, CUmemAllocationType = CUresult, CUmemLocationType, CUmemAllocationType
    CUmemAllocationHandleType, CUmemAccess_flags = CUmemAllocationHandleType, CUmemAccess_flags
    CUmemAllocationGranularity_flags = CUmemAllocationGranularity_flags
    CUdeviceptr, CUmemLocation, CUmemAllocationProp, CUmemAccessDesc = (
        CUdeviceptr,
        CUmemLocation,
        CUmemAllocationProp,
        CUmemAccessDesc,
    )

    needs_context = False

    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        super().__init__("cuda.bindings.driver")
        self.limit_bytes = limit_bytes
        self.handles: list[Handle] = []
        self.mapped: dict[int, Handle] = {}
        self.accessible: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.registered: list[tuple[int, int]] = []
        self._thread = threading.local()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cuMem") and self.needs_context:
            self._check(hasattr(self._thread, "context"), f"{name} in a thread without a context")
        return super().__getattribute__(name)

    def make_context(self) -> None:
        """Does what torch does when it first uses the device in a thread."""
        self._thread.context = "context"

    @property
    def held_bytes(self) -> int:
        return sum(handle.num_bytes for handle in self.handles if not handle.released or handle in self.mapped.values())

    def cuGetErrorName(self, error: CUresult) -> tuple[CUresult, bytes]:
        return CUresult.CUDA_SUCCESS, error.name.encode()

    def cuDriverGetVersion(self) -> tuple[CUresult, int]:
        return CUresult.CUDA_SUCCESS, 12080

    def cuCtxGetCurrent(self) -> tuple[CUresult, str]:
        return CUresult.CUDA_SUCCESS, "context"

    def cuCtxSetCurrent(self, context: str) -> tuple[CUresult]:
        self._check(context == "context", "an unknown context")
        self.make_context()
        return (CUresult.CUDA_SUCCESS,)

    def cuMemGetAllocationGranularity(self, prop: CUmemAllocationProp, option: Any) -> tuple[CUresult, int]:
        self._check_prop(prop)
        return CUresult.CUDA_SUCCESS, GRANULARITY

    def cuMemCreate(self, size: int, prop: CUmemAllocationProp, flags: int) -> tuple[Any, ...]:
        self._check_prop(prop)
        self._check(size > 0 and size % GRANULARITY == 0 and flags == 0, f"cuMemCreate of {size} bytes")
        if self.held_bytes + size > self.limit_bytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        fd = os.memfd_create("chunk")
        os.ftruncate(fd, size)
        return CUresult.CUDA_SUCCESS, self._known(Handle(fd, size, bool(prop.requestedHandleTypes)))

    def cuMemRelease(self, handle: Handle) -> tuple[CUresult]:
        self._check(not handle.released, "a handle released twice")
        handle.released = True
        os.close(handle.fd)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemAddressReserve(self, size: int, alignment: int, address: CUdeviceptr, flags: int) -> tuple[CUresult, CUdeviceptr]:
        self._check(size > 0 and size % GRANULARITY == 0, f"a reservation of {size} bytes")
        self._check(alignment & (alignment - 1) == 0 and flags == 0, f"alignment {alignment}")
        at = mappings.reserve(size)
        self.reserved[at] = size
        return CUresult.CUDA_SUCCESS, CUdeviceptr(at)

    def cuMemAddressFree(self, address: CUdeviceptr, size: int) -> tuple[CUresult]:
        self._check(self.reserved.pop(address, 0) == size, "freeing what was not reserved so")
        self._check(not any(address <= at < address + size for at in self.mapped), "freeing a range with mappings")
        mappings.release(address, size)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemMap(self, address: CUdeviceptr, size: int, offset: int, handle: Handle, flags: int) -> tuple[CUresult]:
        self._check(offset == 0 and flags == 0 and size == handle.num_bytes, "a mapping of part of an allocation")
        self._check(not handle.released and address not in self.mapped, "mapping over a mapping, or nothing")
        inside = any(begin <= address and address + size <= begin + length for begin, length in self.reserved.items())
        self._check(inside, "mapping outside of a reservation")
        mappings.map_file(address, size, handle.fd, 0)
        self.mapped[int(address)] = handle
        return (CUresult.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: CUdeviceptr, size: int, desc: list[CUmemAccessDesc], count: int) -> tuple[CUresult]:
        self._check(count == len(desc) == 1 and desc[0].location.id == 0, "an access descriptor of no device")
        self._check(desc[0].flags == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "no access to write")
        at = int(address)
        while at < address + size:
            self._check(at in self.mapped, "access to what is not mapped")
            self.accessible.add(at)
            at += self.mapped[at].num_bytes
        return (CUresult.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: CUdeviceptr, size: int) -> tuple[CUresult]:
        self._check(int(address) in self.mapped and self.mapped[int(address)].num_bytes == size, "unmapping what is not mapped")
        del self.mapped[int(address)]
        self.accessible.discard(int(address))
        mappings.unmap(address, size)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemExportToShareableHandle(self, handle: Handle, kind: Any, flags: int) -> tuple[CUresult, int]:
        self._check(handle.exportable and not handle.released and flags == 0, "an export of what is not exportable")
        self._check(kind == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "an export of another kind")
        return CUresult.CUDA_SUCCESS, os.dup(handle.fd)

    def cuMemImportFromShareableHandle(self, fd: int, kind: Any) -> tuple[CUresult, Handle | None]:
        self._check(kind == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "an import of another kind")
        try:
            size = os.fstat(fd).st_size
        except OSError:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        return CUresult.CUDA_SUCCESS, self._known(Handle(os.dup(fd), size, True))

    def cuMemcpyHtoDAsync(self, target: CUdeviceptr, source: int, size: int, stream: int) -> tuple[CUresult]:
        self.check_mapped(target, size)
        ctypes.memmove(target, source, size)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyDtoHAsync(self, target: int, source: CUdeviceptr, size: int, stream: int) -> tuple[CUresult]:
        self.check_mapped(source, size)
        ctypes.memmove(target, source, size)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[CUresult]:
        self._check(all(address + size <= at or at + length <= address for at, length in self.registered), "registered twice")
        self.registered.append((address, size))
        return (CUresult.CUDA_SUCCESS,)

    def cuMemHostUnregister(self, address: int) -> tuple[CUresult]:
        found = [one for one in self.registered if one[0] == address]
        self._check(len(found) == 1, "unregistering what is not registered")
        self.registered.remove(found[0])
        return (CUresult.CUDA_SUCCESS,)

    def _known(self, handle: Handle) -> Handle:
        self.handles.append(handle)
        return handle

    def _check_prop(self, prop: CUmemAllocationProp) -> None:
        self._check(prop.type == CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, "memory of another type")
        place = prop.location
        self._check(place.type == CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE and place.id == 0, "memory of another device")

    def check_mapped(self, address: int, size: int) -> None:
        at = address
        while at < address + size:
            begin = next((begin for begin, held in self.mapped.items() if begin <= at < begin + held.num_bytes), None)
            self._check(begin is not None and begin in self.accessible, f"a copy of {size} bytes touches what is not mapped")
            assert begin is not None
            at = begin + self.mapped[begin].num_bytes

    @staticmethod
    def _check(right: bool, what: str) -> None:
        if not right:
            raise Refused(what)


class Stream:
    cuda_stream = 0

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def wait_event(self, event: Event) -> None:
        assert event.query()

    def synchronize(self) -> None:
        """Does nothing: the stream has finished already."""


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert blocking
        assert not enable_timing
        self._recorded = False

    def record(self, stream: Stream) -> None:
        self._recorded = True

    def query(self) -> bool:
        return self._recorded

    def synchronize(self) -> None:
        assert self._recorded


class Torch:
    """Stands in for torch, with the CPU as its CUDA device. Like the real one it asks the driver which memory an address belongs
    to."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.cuda = SimpleNamespace(
            Stream=Stream,
            Event=Event,
            stream=lambda stream: nullcontext(),
            default_stream=lambda device: Stream(),
            current_stream=Stream,
            current_device=lambda: 0,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: int, **options: Any) -> torch.Tensor:
        self._driver.make_context()
        return torch.zeros(*size, **options)

    def device(self, kind: str, index: int) -> torch.device:
        assert kind == "cuda"
        return torch.device("cpu")

    def as_tensor(self, held: Any, device: torch.device) -> torch.Tensor:
        told = held.__cuda_array_interface__
        assert (told["typestr"], told["version"], told["strides"]) == ("|u1", 3, None)
        self._driver.check_mapped(told["data"][0], 1)
        return torch.frombuffer(mappings.bytes_at(told["data"][0], told["shape"][0]), dtype=torch.uint8)


def install(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Any:
    """Returns engine.cuda.memory, imported anew to use this driver."""
    bindings, cuda = ModuleType("cuda.bindings"), ModuleType("cuda")
    bindings.driver = driver  # type: ignore[attr-defined]
    for name, module in (("cuda", cuda), ("cuda.bindings", bindings), ("cuda.bindings.driver", driver)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("engine.cuda.memory", "engine.cuda.copies"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that monkeypatch removes the module imported below
        del sys.modules[name]
    cuda_memory = importlib.import_module("engine.cuda.memory")
    monkeypatch.setattr(cuda_memory, "torch", Torch(driver))
    monkeypatch.setattr(sys.modules["engine.cuda.copies"], "torch", Torch(driver))
    return cuda_memory
