"""The inventory of NVIDIA's management library, which is loaded on first use, because nodes without GPUs do not need it.

Source: NVML API reference.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pynvml

from config.devices import NoGpus
from daemon.gpu.inventory import Gpu, GpuFault, GpuProcess

VOLATILE, UNCORRECTED = pynvml.NVML_VOLATILE_ECC, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED


class Nvml:
    """The inventory of the real driver."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: Any = None

    def gpus(self) -> Sequence[Gpu]:
        with self._lock:
            _start()
            try:
                return [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
            except pynvml.NVMLError as error:
                raise NoGpus(f"NVIDIA's driver: {error}") from None

    def next_fault(self, timeout_s: float) -> GpuFault | None:
        with self._lock:
            if self._events is None:
                _start()
                self._events = _watched()
        try:
            event = pynvml.nvmlEventSetWait_v2(self._events, int(timeout_s * 1e3))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
                return GpuFault("", 79)
            raise NoGpus(f"NVIDIA's driver: {error}") from None
        uuid = ""
        with contextlib.suppress(pynvml.NVMLError):
            uuid = str(pynvml.nvmlDeviceGetUUID(event.device))
        return GpuFault(uuid, int(event.eventData))


def _start() -> None:
    """Initializes the library; may be called again. Raises NoGpus."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpus(f"NVIDIA's driver cannot be asked: {error}") from None


def _watched() -> Any:
    """Returns an event set that receives the Xids of all GPUs that report them. Raises NoGpus."""
    try:
        events = pynvml.nvmlEventSetCreate()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError_NotSupported):
                pynvml.nvmlDeviceRegisterEvents(
                    pynvml.nvmlDeviceGetHandleByIndex(index), pynvml.nvmlEventTypeXidCriticalError, events
                )
        return events
    except pynvml.NVMLError as error:
        raise NoGpus(f"NVIDIA's driver reports no faults: {error}") from None


def _gpu(index: int) -> Gpu:
    """Returns the state of a GPU. One that has fallen off the bus is reported as far as possible."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle))
        total_bytes, used_bytes = _memory(handle)
    except pynvml.NVMLError as error:
        return Gpu(index, "", "", 0, problem=str(error))
    utilisation = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    power_mw = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    remapped = _ask(pynvml.nvmlDeviceGetRemappedRows, handle)
    return Gpu(
        index,
        uuid,
        name,
        total_bytes,
        used_bytes,
        temperature_c=_ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        utilisation_percent=None if utilisation is None else int(utilisation.gpu),
        power_w=None if power_mw is None else power_mw / 1e3,
        ecc_errors=_ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, VOLATILE),
        faulty_rows=None if remapped is None else int(remapped[0]) + int(remapped[1]),
        problem=_memory_problem(remapped),
        processes=_processes(handle),
    )


def _memory(handle: Any) -> tuple[int, int]:
    """Returns the (total, used) bytes of a GPU, both without what the driver reserves. Older drivers count that as used."""
    with contextlib.suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return int(memory.total) - int(memory.reserved), int(memory.used)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.total), int(memory.used)


def _memory_problem(remapped: Any) -> str:
    """Returns what is wrong with a GPU's memory, "" if nothing is. remapped: numbers of rows (corrected, uncorrected, pending,
    failed); None if not reported."""
    if remapped is None:
        return ""
    if remapped[3]:
        return "a bad memory row could not be taken out of use: the GPU needs repair"
    return "a bad memory row is taken out of use at the next reset" if remapped[2] else ""


def _processes(handle: Any) -> tuple[GpuProcess, ...]:
    found = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return tuple(GpuProcess(int(one.pid), _name(int(one.pid)), one.usedGpuMemory) for one in found)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it is gone, or in another PID namespace
        return "unknown"


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the driver's answer, None if it has none for this GPU."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
