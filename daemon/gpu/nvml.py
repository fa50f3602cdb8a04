"""The inventory of the machine's GPUs from NVIDIA's management library (NVML). This module is imported on first use, because nodes
without GPUs do not need it.

Source: NVML API reference.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml

from config.devices import NoGpus
from config.units import format_bytes
from daemon.gpu.inventory import MIN_CUDA, Gpu, GpuFault, GpuProcess, holders

MIN_CAPABILITY = (8, 0)  # the least compute capability of a GPU: for bfloat16 and Triton's kernels
EXCLUSIVE = (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD)
VOLATILE, UNCORRECTED = pynvml.NVML_VOLATILE_ECC, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED


class Nvml:
    """The Inventory of the GPUs that NVIDIA's driver reports through NVML."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: Any = None

    def gpus(self) -> Sequence[Gpu]:
        with self._lock:
            start()
            try:
                old = _old_driver()
                return [gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in _gpu_and_slices(index, old)]
            except pynvml.NVMLError as error:
                raise NoGpus(f"NVIDIA's driver: {error}") from None

    def next_fault(self, timeout_s: float) -> GpuFault | None:
        with self._lock:
            if self._events is None:
                start()
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


def start() -> None:
    """Initializes NVML; further calls do no harm. Raises NoGpus if there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        hint = ""
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            hint = "; libnvidia-ml.so.1 comes with the driver, and into a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        raise NoGpus(f"NVIDIA's driver cannot be asked: {error}{hint}") from None


def _old_driver() -> str:
    """Returns why the driver is too old for hearthd, "" if it is new enough or does not tell its version."""
    cuda = _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    if cuda is None or cuda >= MIN_CUDA:
        return ""
    version = _ask(pynvml.nvmlSystemGetDriverVersion) or "of unknown version"
    return f"the driver {version} is for CUDA {cuda // 1000}.{cuda % 1000 // 10}: 12.0 or newer is needed"


def _watched() -> Any:
    """Returns an event set of NVML that receives the faults (Xids) of all GPUs that can report them. Raises NoGpus if the driver
    does not let hearthd ask for faults."""
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


def _gpu_and_slices(index: int, old_driver: str) -> list[Gpu]:
    """Returns the state of a GPU, followed by the states of its MIG slices if it is divided. A GPU that does not respond has a
    `problem` and no UUID. index: the driver's number for the GPU. old_driver: why the driver is too old, "" if it is not."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return [Gpu(index, "", "", 0, problem=str(error), unusable=str(error))]
    gpu = _gpu(index, handle)
    unusable, note = gpu.unusable or old_driver or _too_old(handle), ""
    mode = _ask(pynvml.nvmlDeviceGetComputeMode, handle)
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        unusable = unusable or f"its compute mode is Prohibited: `nvidia-smi -i {index} -c DEFAULT` allows programs on it"
    is_shared = mode not in EXCLUSIVE
    if not is_shared:
        note = "its compute mode is Exclusive: one process at a time, so no model can have an engine of its own there (isolate)"
    modes = _ask(pynvml.nvmlDeviceGetMigMode, handle)  # (mode now, mode after the next reset)
    if modes is None or modes[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return [replace(gpu, unusable=unusable or _held_alone(gpu, is_shared), note=note)]
    slices = [
        replace(one, slice_of=gpu.uuid, unusable=one.unusable or unusable or _held_alone(one, is_shared), note=note)
        for one in _slices(index, handle)
    ]
    named = ", ".join(f"{one.uuid} ({one.name}, {format_bytes(one.total_bytes)})" for one in slices)
    divided = f"it is divided by MIG; name a slice: {named}" if slices else "MIG is enabled and has no slices: nvidia-smi mig -cgi"
    return [replace(gpu, unusable=unusable or divided, note=note), *slices]


def _held_alone(gpu: Gpu, is_shared: bool) -> str:
    """Returns why an engine cannot use a GPU or slice: its compute mode is Exclusive, and another program holds it. Returns "" if
    an engine can use it. Processes that are not visible are ignored, because they may be engines. is_shared: whether the compute
    mode lets several processes use the GPU."""
    others = [one for one in gpu.processes if one.is_engine is False]
    if is_shared or not others:
        return ""
    held = holders(replace(gpu, processes=tuple(others)))
    return f"its compute mode is Exclusive and others hold it: {held}; end them, or `nvidia-smi -i {gpu.index} -c DEFAULT`"


def _slices(index: int, handle: Any) -> list[Gpu]:
    """Returns the states of the MIG slices into which a GPU is divided; [] if it has none. index: the driver's number for the GPU.
    handle: NVML's handle for it."""
    found = []
    for number in range(_ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        part = _ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if part is not None:
            found.append(_gpu(index, part))
    return found


def _too_old(handle: Any) -> str:
    """Returns why hearthd's kernels cannot run on a GPU of this generation; "" if they can, or if the generation is unknown.
    handle: NVML's handle for the GPU."""
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    if capability is None or tuple(capability) >= MIN_CAPABILITY:
        return ""
    return f"its compute capability is {capability[0]}.{capability[1]}: 8.0 or newer is needed (Ampere, Ada, Hopper, Blackwell)"


def _gpu(index: int, handle: Any) -> Gpu:
    """Returns the state of a GPU or of a MIG slice. If it does not respond, the result has no UUID and a `problem`. index: the
    GPU's number. handle: NVML's handle for the GPU or slice."""
    try:
        uuid, name = str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle))
        total_bytes, used_bytes = _memory(handle)
    except pynvml.NVMLError as error:
        return Gpu(index, "", "", 0, problem=str(error), unusable=str(error))
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
    """Returns (total, used) bytes of a GPU's memory. The part that the driver reserves is not included, except by older drivers,
    which include it in both numbers. Raises pynvml.NVMLError."""
    with contextlib.suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return int(memory.total) - int(memory.reserved), int(memory.used)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.total), int(memory.used)


def _memory_problem(remapped: Any) -> str:
    """Returns what is wrong with a GPU's memory; "" if nothing is. remapped: four values, as NVML reports them: the number of
    memory rows that were remapped because of correctable errors, the same for uncorrectable errors, whether a remapping waits for
    the next reset, and whether one has failed; None if not reported."""
    if remapped is None:
        return ""
    if remapped[3]:
        return "a bad memory row could not be taken out of use: the GPU needs repair"
    return "a bad memory row is taken out of use at the next reset" if remapped[2] else ""


def _processes(handle: Any) -> tuple[GpuProcess, ...]:
    found = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return tuple(GpuProcess(int(one.pid), _name(int(one.pid)), one.usedGpuMemory, _is_engine(int(one.pid))) for one in found)


def _is_engine(pid: int) -> bool | None:
    """Returns whether a process is an engine of hearthd, to judge by its command line; None if the process is not visible."""
    try:
        return b"\0-m\0engine\0--channel-fd\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # the process has ended, or is in another PID namespace
        return "unknown"


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of NVML with the given arguments and returns its result; None if it raises an error, for example because
    this GPU does not have the sensor."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
