"""Checks the NVIDIA driver and the GPUs of the configured devices, as the driver's management library reports them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from config.devices import NoGpus
from daemon.cli.doctor.finding import FAIL, OK, WARN, Finding
from daemon.cli.table import size
from daemon.gpu.inventory import MIN_CUDA, Gpu, Inventory, held_by_others, holders


@dataclass(slots=True, frozen=True)
class Driver:
    """An NVIDIA driver. cuda: the newest CUDA version that it supports, 1000 x major + 10 x minor. names: the names of the GPUs."""

    version: str
    cuda: int
    names: tuple[str, ...]


def driver(found: Driver | str, wants_gpu: bool, has_uvm: bool) -> Finding:
    """Checks the NVIDIA driver and returns the finding. found: the driver, or why there is none. wants_gpu: whether cuda devices
    are configured. has_uvm: whether /dev/nvidia-uvm exists."""
    if isinstance(found, str):
        if not wants_gpu:
            return Finding("driver", OK, f"no GPU ({found.partition(';')[0]}); none is configured")
        return Finding("driver", FAIL, found, "install NVIDIA's driver, or configure no cuda device")
    text = f"{found.version}, CUDA {found.cuda // 1000}.{found.cuda % 1000 // 10}, {', '.join(found.names) or 'no GPU'}"
    if not found.names and wants_gpu:
        return Finding("driver", FAIL, text, "the driver sees no GPU: nvidia-smi, journalctl -k")
    if found.cuda < MIN_CUDA:
        return Finding("driver", FAIL if wants_gpu else WARN, text, "upgrade to a driver for CUDA 12 or newer")
    if found.names and not has_uvm:
        change = "systemctl enable --now nvidia-persistenced, or nvidia-modprobe -u"
        return Finding("driver", WARN, text + ", /dev/nvidia-uvm is missing", change)
    return Finding("driver", OK, text)


def find_driver(wants_gpu: bool) -> Finding:
    return driver(_ask(), wants_gpu, os.path.exists("/dev/nvidia-uvm"))


def device(name: str, gpu: Gpu | None, uuid: str, budget_bytes: int, is_running: bool) -> Finding:
    """Checks the GPU of one configured cuda device and returns the finding. gpu: the driver's report on it, None if the driver has
    no GPU with that UUID. budget_bytes: the device's configured budget. is_running: whether hearthd runs and so already holds the
    GPU's memory."""
    if gpu is None:
        return Finding(name, FAIL, f"the driver has no {uuid} (any more)", "journalctl -k | grep Xid; reset the GPU or the machine")
    found = f"{gpu.name}, {size(gpu.used_bytes)} of {size(gpu.total_bytes)} used"
    if gpu.unusable:
        return Finding(name, FAIL, f"{gpu.name}: {gpu.unusable}", "name another device")
    if gpu.problem:
        return Finding(
            name, FAIL if "repair" in gpu.problem else WARN, f"{found}; {gpu.problem}", "nvidia-smi --gpu-reset when it is idle"
        )
    if not is_running and gpu.total_bytes - gpu.used_bytes < budget_bytes:
        held = holders(gpu) or "nobody the driver names"
        return Finding(
            name, FAIL, f"{found} by {held}; the budget is {size(budget_bytes)}", "stop them, or give the device a smaller budget"
        )
    if taken := held_by_others(gpu, budget_bytes):
        found += f"; {taken}"
    if gpu.ecc_errors:
        return Finding(
            name, WARN, f"{found}; {gpu.ecc_errors} memory errors not corrected", "nvidia-smi --gpu-reset when it is idle"
        )
    if gpu.note:
        return Finding(name, WARN, f"{found}; {gpu.note}", f"nvidia-smi -i {gpu.index} -c DEFAULT")
    return Finding(name, OK, found)


def find_devices(inventory: Inventory, uuids: Mapping[str, str], budgets: Mapping[str, int], is_running: bool) -> list[Finding]:
    """Checks the GPU of each configured cuda device, and returns one finding for each. Returns none if the driver cannot be asked,
    which `find_driver` reports. uuids: device -> UUID of its GPU. budgets: device -> budget in bytes. is_running: whether hearthd
    runs and so already uses its GPUs' memory."""
    if not uuids:
        return []
    try:
        gpus = {gpu.uuid: gpu for gpu in inventory.gpus()}
    except NoGpus:
        return []
    return [device(name, gpus.get(uuid), uuid, budgets[name], is_running) for name, uuid in uuids.items()]


def _ask() -> Driver | str:
    import pynvml

    from daemon.gpu import nvml

    try:
        nvml.start()
    except NoGpus as error:
        return str(error)
    try:
        names = tuple(
            str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))) for index in range(pynvml.nvmlDeviceGetCount())
        )
        return Driver(str(pynvml.nvmlSystemGetDriverVersion()), int(pynvml.nvmlSystemGetCudaDriverVersion()), names)
    except pynvml.NVMLError as error:
        return str(error)
    finally:
        pynvml.nvmlShutdown()
