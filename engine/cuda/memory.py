"""Allocates a CUDA device's chunks: physical memory, by the driver's virtual memory management. All chunks are mapped once as the
arena (one address range); those with weights are also mapped into the address ranges of weights. Addresses never change, so
captured graphs survive an eviction.

Source: CUDA driver API, "Virtual Memory Management". Imported only where cuda-bindings is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from cuda.bindings import driver

from engine.cuda.copies import CudaStreams, EventFence, SummedCopies, SummedCopy
from engine.cuda.unmapping import Unmapping
from engine.memory import handles as descriptors
from engine.memory.arena import copy_pieces
from engine.memory.chunk_memory import Piece
from loader.threads import Thread
from scheduler.batch.plan import IntArray

log = logging.getLogger("engine")

FILE_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class DeviceError(RuntimeError):
    """Raised when the CUDA driver refuses a call. After most of these errors only a new process can use the device."""


def call_driver(function: Any, *arguments: Any) -> Any:
    """Calls a function of the driver and returns its result, if it has one. Raises MemoryError if the device is out of memory,
    DeviceError for any other error."""
    status, *results = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        name = driver.cuGetErrorName(status)[1]
        text = f"{function.__name__}: {name.decode() if isinstance(name, bytes) else status}"
        out_of_memory = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        raise (MemoryError if status == out_of_memory else DeviceError)(text)
    return results[0] if results else None


def driver_version() -> int:
    """Returns the version of CUDA that the driver supports, 12040 for 12.4."""
    return int(call_driver(driver.cuDriverGetVersion))


def allocations(index: int, exportable: bool) -> tuple[Any, Any, int]:
    """Returns what the driver needs to allocate memory of device `index`: the properties of an allocation, the access to it once it
    is mapped, and the number of bytes of which its size must be a multiple. exportable: whether other processes will map the
    memory."""
    place = driver.CUmemLocation()
    place.type, place.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, index
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location = place
    if exportable:
        wanted.requestedHandleTypes = FILE_DESCRIPTOR
    access = driver.CUmemAccessDesc()
    access.location = place
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return wanted, access, int(call_driver(driver.cuMemGetAllocationGranularity, wanted, minimum))


class DeviceBytes:
    """A range of device memory that torch can use as a tensor without owning it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaMemory:
    """The chunk memory (engine.memory.chunk_memory.ChunkMemory) of CUDA device `index`, in torch's (primary) context. All memory is
    allocated at once.

    chunk_bytes: a multiple of the device's granularity (2 MiB). exportable: whether `export` will be called.
    handles: file descriptors from another process's `export`, whose chunks are used instead of new ones; the caller closes the
    descriptors. Empty: new chunks are allocated.

    Raises MemoryError if the device has too little memory, ValueError for a wrong chunk_bytes or number of handles, and DeviceError
    if the driver refuses a call."""

    def __init__(
        self, num_chunks: int, chunk_bytes: int, index: int = 0, exportable: bool = False, handles: Sequence[int] = ()
    ) -> None:
        if handles and len(handles) != num_chunks:
            raise ValueError(f"{len(handles)} handles that are not those of {num_chunks} chunks of {chunk_bytes} bytes")
        self.num_chunks, self.chunk_bytes = num_chunks, chunk_bytes
        self.num_bytes = num_chunks * chunk_bytes
        self._index = index
        self._device = torch.device("cuda", index)
        torch.zeros(1, device=self._device)  # makes the context
        self._context = call_driver(driver.cuCtxGetCurrent)
        wanted, self._access, granularity = allocations(index, exportable)
        if chunk_bytes <= 0 or chunk_bytes % granularity:
            raise ValueError(f"chunk_bytes {chunk_bytes} is not a multiple of the device's granularity {granularity}")
        self._handles: list[Any] = []
        self._never_unmapped: list[object] = []  # host memory that the driver still has registered
        self._arena_address = self.reserve(self.num_bytes)
        self._streams = CudaStreams(self._device)
        self._unmapping = Unmapping(self._unmap_now, chunk_bytes)
        try:
            for number in range(num_chunks):
                if handles:
                    self._handles.append(call_driver(driver.cuMemImportFromShareableHandle, handles[number], FILE_DESCRIPTOR))
                else:
                    self._handles.append(call_driver(driver.cuMemCreate, chunk_bytes, wanted, 0))
            self.map(self._arena_address, range(num_chunks))
        except BaseException:
            self._drop()
            raise
        self.arena = self.tensor(self._arena_address, self.num_bytes)

    def reserve(self, num_bytes: int) -> int:
        self._enter()
        alignment = self.chunk_bytes & -self.chunk_bytes
        return int(call_driver(driver.cuMemAddressReserve, num_bytes, alignment, driver.CUdeviceptr(0), 0))

    def map(self, address: int, chunks: Sequence[int]) -> None:
        if len(chunks) and not 0 <= min(chunks) <= max(chunks) < self.num_chunks:
            raise IndexError(f"chunks {min(chunks)} to {max(chunks)} are not among the {self.num_chunks}")
        self._enter()
        size = self.chunk_bytes
        self._unmapping.wait_for(address, len(chunks) * size)
        mapped = 0
        try:
            for chunk in chunks:
                call_driver(driver.cuMemMap, driver.CUdeviceptr(address + mapped * size), size, 0, self._handles[chunk], 0)
                mapped += 1
            if mapped:
                call_driver(driver.cuMemSetAccess, driver.CUdeviceptr(address), mapped * size, [self._access], 1)
        except (MemoryError, DeviceError):
            for number in range(mapped):
                driver.cuMemUnmap(driver.CUdeviceptr(address + number * size), size)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        """Waits for all work launched on the device, then queues the range's chunks to be unmapped by another thread. The wait is
        needed, because a kernel that still read the range would make the whole CUDA context unusable. The chunks may be mapped
        elsewhere as soon as this returns. Later calls of `map` and `release` for the range wait for the thread. Raises RuntimeError
        if an earlier range could not be unmapped."""
        self._enter()
        self._streams.synchronise()
        self._unmapping.add(address, num_bytes)

    def _unmap_now(self, address: int, num_bytes: int) -> None:
        self._enter()
        for place in range(address, address + num_bytes, self.chunk_bytes):
            call_driver(driver.cuMemUnmap, driver.CUdeviceptr(place), self.chunk_bytes)

    def release(self, address: int, num_bytes: int) -> None:
        self._unmapping.wait_for(address, num_bytes)
        self._enter()
        call_driver(driver.cuMemAddressFree, driver.CUdeviceptr(address), num_bytes)

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.as_tensor(DeviceBytes(address, num_bytes), device=self._device)

    def copy_in(self, address: int, source: Any) -> SummedCopy:
        return SummedCopy(self.start_several([(address, source)], out=False))

    def copy_out(self, address: int, target: Any) -> SummedCopy:
        return SummedCopy(self.start_several([(address, target)], out=True))

    def start_several(self, pieces: Sequence[Piece], out: bool) -> SummedCopies:
        self._enter()
        stream = self._streams.outgoing if out else self._streams.incoming
        if out:
            self._streams.after_steps()
        handle = stream.cuda_stream
        try:
            for address, held in pieces:
                on_host, on_device = held.__array_interface__["data"][0], driver.CUdeviceptr(address)
                if out:
                    call_driver(driver.cuMemcpyDtoHAsync, on_host, on_device, len(held), handle)
                else:
                    call_driver(driver.cuMemcpyHtoDAsync, on_device, on_host, len(held), handle)
        except BaseException:
            EventFence(stream).wait()  # the copies before it
            raise
        return self._streams.summed(pieces, stream)

    def write(self, address: int, source: Any) -> None:
        self._enter()
        stream = self._streams.incoming
        call_driver(driver.cuMemcpyHtoDAsync, driver.CUdeviceptr(address), source.ctypes.data, len(source), stream.cuda_stream)

    def copying(self) -> AbstractContextManager[object]:
        self._enter()
        return self._streams.on_incoming()

    def fence(self) -> EventFence:
        self._enter()
        return EventFence(self._streams.incoming)

    def register_host(self, address: int, num_bytes: int) -> None:
        self._enter()
        call_driver(driver.cuMemHostRegister, address, num_bytes, 0)

    def unregister_host(self, address: int, memory: object) -> None:
        try:
            self._enter()
            # another thread waits, since a step of a group that has lost a device may go on for long
            waiting = Thread(target=self._unregister, args=(self._streams.steps_so_far(), address, memory), name="unregistering")
            waiting.start()
        except Exception as error:  # no memory for the thread, for one
            self._keep_registered(memory, error)

    def _unregister(self, steps: EventFence, address: int, memory: object) -> None:
        try:
            self._enter()
            steps.wait()
            call_driver(driver.cuMemHostUnregister, address)
        except Exception as error:
            self._keep_registered(memory, error)

    def _keep_registered(self, memory: object, error: Exception) -> None:
        log.error("host memory stays registered with the device: %s", error)
        self._never_unmapped.append(memory)

    def prepare(self, chunk: int) -> int:
        """Returns the size of a chunk in bytes and does nothing else, because a device's memory exists from the start."""
        return self.chunk_bytes

    def discard(self, first_chunk: int, num_chunks: int) -> None:
        """Only checks the arguments, because a device's memory is not given back to the system. Raises IndexError for chunks that
        do not exist."""
        if not 0 <= first_chunk <= first_chunk + num_chunks <= self.num_chunks:
            raise IndexError(f"chunks {first_chunk}..{first_chunk + num_chunks} are outside the memory's {self.num_chunks}")

    def checksum(self, address: int, num_bytes: int) -> int:
        self._enter()
        return self._streams.sum_of(self.tensor(address, num_bytes))

    def export(self) -> list[int]:
        """Returns one file descriptor for each chunk, by which another process can map the chunk. Raises DeviceError, and OSError
        if this process may not open so many descriptors; none is left open then."""
        self._enter()
        descriptors.allow_many_files(len(self._handles))
        exported: list[int] = []
        try:
            # what came before an error stays in the list
            exported.extend(
                int(call_driver(driver.cuMemExportToShareableHandle, each, FILE_DESCRIPTOR, 0)) for each in self._handles
            )
        except BaseException:
            descriptors.close(exported)
            raise
        return exported

    def copy_within(self, piece_bytes: int, sources: IntArray, targets: IntArray) -> None:
        """Copies pieces of piece_bytes bytes within the arena: the piece with index sources[i] to the one with index targets[i].
        Waits for the copies, because the chunks of the sources may be given to a load at once, whose copies are on another
        stream."""
        copy_pieces(self.arena, piece_bytes, sources, targets)
        self._streams.finish_steps()

    def close(self) -> None:
        self._enter()
        self._unmapping.finish()
        self._streams.synchronise()
        self._unmap_now(self._arena_address, self.num_bytes)
        self._drop()

    def _drop(self) -> None:
        for handle in self._handles:
            call_driver(driver.cuMemRelease, handle)
        self._handles.clear()
        self.release(self._arena_address, self.num_bytes)

    def _enter(self) -> None:
        """Makes this device's CUDA context current in the calling thread, because a new thread has none."""
        call_driver(driver.cuCtxSetCurrent, self._context)
