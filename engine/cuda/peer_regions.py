"""Memory on this GPU that the other GPUs of a group map, and theirs as this one maps it, by the driver's virtual memory management.

Each engine sees one GPU, so cuDeviceCanAccessPeer cannot be asked about another one's: no number stands for it here. A descriptor
of its memory can be imported and mapped for the own GPU nevertheless, as NCCL does it. Where GPUs do not reach each other, the
driver refuses that, or a sum that is tried gives wrong numbers (engine/cuda/peers.py).

Source: CUDA driver API, "Virtual Memory Management". Imported only where cuda-bindings is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from cuda.bindings import driver

from engine.cuda.kernels.triton_peers import REGION_BYTES
from engine.cuda.memory import FILE_DESCRIPTOR, DeviceBytes, allocations, call_driver


class DeviceRegions:
    """The regions of `size` ranks in one range of addresses (an engine.cuda.peers.Regions): first this rank's, which is new memory
    of the current device and all 0, then those of the ranks behind it. Raises MemoryError, DeviceError."""

    def __init__(self, size: int) -> None:
        index = torch.cuda.current_device()
        self._device, self._stream = torch.device("cuda", index), torch.cuda.current_stream()
        self._context = call_driver(driver.cuCtxGetCurrent)
        wanted, self._access, granularity = allocations(index, exportable=True)
        self.num_bytes = -(-REGION_BYTES // granularity) * granularity
        self._handles: dict[int, Any] = {}  # by how many ranks behind this one
        self._range_bytes = size * self.num_bytes
        self._address = int(call_driver(driver.cuMemAddressReserve, self._range_bytes, granularity, driver.CUdeviceptr(0), 0))
        try:
            self._map(0, call_driver(driver.cuMemCreate, self.num_bytes, wanted, 0))
            # torch asks which device the first address belongs to, so this rank's memory must come first
            self.all = torch.as_tensor(DeviceBytes(self._address, self._range_bytes), device=self._device).view(size, -1)
            self.all[0].zero_()
            self._stream.synchronize()
        except BaseException:
            self._drop()
            raise

    def export(self) -> int:
        return int(call_driver(driver.cuMemExportToShareableHandle, self._handles[0], FILE_DESCRIPTOR, 0))

    def map(self, step: int, handle: int) -> None:
        self._enter()
        self._map(step, call_driver(driver.cuMemImportFromShareableHandle, handle, FILE_DESCRIPTOR))

    def close(self) -> None:
        self._enter()
        for stream in (self._stream, torch.cuda.default_stream(self._device)):
            launched = torch.cuda.Event(blocking=True)
            launched.record(stream)
            launched.synchronize()
        self._drop()

    def _map(self, step: int, handle: Any) -> None:
        """Maps an allocation to the place of the rank so many ranks behind this one. The allocation is released if that fails."""
        place = driver.CUdeviceptr(self._address + step * self.num_bytes)
        try:
            call_driver(driver.cuMemMap, place, self.num_bytes, 0, handle, 0)
        except BaseException:
            call_driver(driver.cuMemRelease, handle)
            raise
        self._handles[step] = handle
        call_driver(driver.cuMemSetAccess, place, self.num_bytes, [self._access], 1)

    def _drop(self) -> None:
        for step, handle in self._handles.items():
            call_driver(driver.cuMemUnmap, driver.CUdeviceptr(self._address + step * self.num_bytes), self.num_bytes)
            call_driver(driver.cuMemRelease, handle)
        self._handles.clear()
        call_driver(driver.cuMemAddressFree, driver.CUdeviceptr(self._address), self._range_bytes)

    def _enter(self) -> None:
        """Makes the device's CUDA context the calling thread's, because a new thread has none."""
        call_driver(driver.cuCtxSetCurrent, self._context)
