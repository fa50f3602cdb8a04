"""Maps memory of a split model's GPUs into each other, by the driver's virtual memory management: a region of this GPU for the
other GPUs, and their regions for this GPU.

Whether the GPUs reach each other's memory is only known by trying. Each engine sees only its own GPU, so it has no index of another
GPU for cuDeviceCanAccessPeer. But it can import memory of another GPU by a file descriptor and map it for its own GPU, as NCCL
does. If the GPUs do not reach each other, the driver refuses this, or a trial sum is wrong (engine/cuda/peers.py).

Source: CUDA driver API, "Virtual Memory Management". Imported only where cuda-bindings is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from cuda.bindings import driver

from engine.cuda.kernels.triton_peers import REGION_BYTES
from engine.cuda.memory import FILE_DESCRIPTOR, DeviceBytes, allocations, call_driver


class DeviceRegions:
    """The memory regions of all `size` ranks (GPUs) of a split model, in one range of addresses (an engine.cuda.peers.Regions). The
    first region is this rank's own: new memory of the current device, filled with 0. After it come those of the next higher ranks,
    with rank 0 after the last rank. Raises MemoryError if the device has no memory for a region, and DeviceError if the driver
    refuses a call."""

    def __init__(self, size: int) -> None:
        index = torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self._context = call_driver(driver.cuCtxGetCurrent)
        wanted, self._access, granularity = allocations(index, exportable=True)
        self.num_bytes = -(-REGION_BYTES // granularity) * granularity
        self._handles: dict[int, Any] = {}  # distance from this rank, counted upwards and around -> the region's allocation
        self._range_bytes = size * self.num_bytes
        self._address = int(call_driver(driver.cuMemAddressReserve, self._range_bytes, granularity, driver.CUdeviceptr(0), 0))
        try:
            self._map(0, call_driver(driver.cuMemCreate, self.num_bytes, wanted, 0))
            # torch asks which device the first address belongs to, so this rank's memory must come first
            self.all = torch.as_tensor(DeviceBytes(self._address, self._range_bytes), device=self._device).view(size, -1)
            self.all[0].zero_()
            torch.cuda.current_stream().synchronize()
        except BaseException:
            self._drop()
            raise

    def export(self) -> int:
        return int(call_driver(driver.cuMemExportToShareableHandle, self._handles[0], FILE_DESCRIPTOR, 0))

    def map(self, step: int, handle: int) -> None:
        self._enter()
        self._map(step, call_driver(driver.cuMemImportFromShareableHandle, handle, FILE_DESCRIPTOR))

    def wait_for_steps(self) -> None:
        self._enter()
        # Not for the stream of loads: another group's load may wait there in an exchange, for a rank that waits for this engine.
        launched = torch.cuda.Event(blocking=True)
        launched.record(torch.cuda.default_stream(self._device))
        launched.synchronize()

    def close(self) -> None:
        self._enter()
        self._drop()

    def _map(self, step: int, handle: Any) -> None:
        """Maps the region of the rank that is `step` ranks after this one to its place in the range. handle: the region's
        allocation, which is released if the driver cannot map it."""
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
        """Makes the device's CUDA context current in the calling thread, because a new thread has none."""
        call_driver(driver.cuCtxSetCurrent, self._context)
