"""Determines the node's devices and the memory budget of each. Checks the setting `device` against the machine's memory and its
GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from config import units
from config.device_names import is_local
from config.load import ConfigError, located_setting
from config.schema import DeviceBudget, NodeConfig

DEFAULT_CPU_PERCENT = 50
MIN_CHUNKS = 8
# The default budget leaves this much of a GPU: the CUDA context takes about 0.5 GiB, torch reserves 0.5 GiB for graphs and block
# tables (engine/cuda/work_space.py), and the driver loads modules and graph executables.
CUDA_LEFT_BYTES = 3 << 29


@dataclass(slots=True, frozen=True)
class GpuMemory:
    """A GPU, or a MIG slice of one, and its memory. index: the driver's number for the GPU, in the order of the PCI bus; a slice
    has the index of its whole GPU, so only the UUID identifies the slice. total_bytes: its memory without the part that the driver
    reserves. taken_bytes: the part of total_bytes that processes other than hearthd's engines hold. unusable: the reason why no
    engine can run on it; "" if one can. is_slice: whether it is a MIG slice."""

    index: int
    uuid: str
    total_bytes: int
    taken_bytes: int = 0
    unusable: str = ""
    is_slice: bool = False


class NoGpus(Exception):
    """Raised if the driver reports no GPUs; the message tells why."""


def no_driver() -> Sequence[GpuMemory]:
    raise NoGpus("this process was given no way to ask for GPUs")


def device_budgets(
    config: NodeConfig,
    memory_bytes: int,
    source: str = "flags",
    gpus: Callable[[], Sequence[GpuMemory]] = no_driver,
) -> list[DeviceBudget]:
    """Returns the node's devices with their budgets. If none is configured, the only device is `cpu:0` with half of the machine's
    memory. memory_bytes: the machine's memory. source: where the settings come from, for errors. gpus: returns the machine's GPUs
    or raises NoGpus; called only if a cuda device is configured.

    Raises ConfigError for a device that is named twice or does not exist, for a budget below 8 chunks or above the GPU's memory,
    and for cpu devices whose budgets together exceed the machine's memory. A device of another host is taken with its configured
    budget, because nothing else is known about it here."""
    try:
        return _device_budgets(config, memory_bytes, source, gpus)
    except ConfigError as error:
        raise located_setting(error) from None


def _device_budgets(
    config: NodeConfig, memory_bytes: int, source: str, gpus: Callable[[], Sequence[GpuMemory]]
) -> list[DeviceBudget]:
    if not config.device:
        return [DeviceBudget("cpu:0", memory_bytes * DEFAULT_CPU_PERCENT // 100)]
    devices: dict[str, DeviceBudget] = {}
    for text in config.device:
        try:
            name, amount = units.parse_device(text)
        except ValueError as error:
            raise ConfigError(source, "device", f"{text!r} {error}") from None
        if name in devices:
            raise ConfigError(source, "device", f"{name} is named twice")
        uuid, total_bytes, free_bytes = "", memory_bytes, memory_bytes
        if is_local(name, "cuda"):
            try:
                gpu = _gpu(name.partition(":")[2], gpus())
            except (NoGpus, LookupError) as error:
                raise ConfigError(source, "device", f"{text!r}: {error}") from None
            if gpu.unusable:
                raise ConfigError(source, "device", f"{text!r}: {gpu.unusable}")
            uuid, total_bytes, free_bytes = gpu.uuid, gpu.total_bytes, gpu.total_bytes - gpu.taken_bytes
            other = next((device.name for device in devices.values() if device.uuid == uuid), None)
            if other is not None:
                raise ConfigError(source, "device", f"{text!r} is the same GPU as {other}, {uuid}")
        try:
            budget_bytes = units.parse_budget(amount, total_bytes) if amount else max(0, free_bytes - CUDA_LEFT_BYTES)
        except ValueError as error:
            raise ConfigError(source, "device", f"{text!r}: the budget {error}") from None
        least = MIN_CHUNKS * units.parse_bytes(config.chunk_bytes)
        if budget_bytes < least:
            taken = total_bytes - free_bytes
            others = f"; other processes hold {units.format_bytes(taken)} of {units.format_bytes(total_bytes)}" if taken else ""
            raise ConfigError(
                source,
                "device",
                f"{text!r}: the budget must be at least 8 chunks of chunk_bytes, {units.format_bytes(least)}{others}",
            )
        if uuid and budget_bytes > total_bytes:
            has = units.format_bytes(total_bytes)
            raise ConfigError(source, "device", f"{text!r}: the budget is {units.format_bytes(budget_bytes)}, the GPU has {has}")
        devices[name] = DeviceBudget(name, budget_bytes, uuid)
    total = sum(device.budget_bytes for device in devices.values() if device.is_local("cpu"))
    if total > memory_bytes:
        raise ConfigError(
            source,
            "device",
            f"the budgets together are {units.format_bytes(total)}, the machine has {units.format_bytes(memory_bytes)}",
        )
    return list(devices.values())


def _gpu(name: str, gpus: Sequence[GpuMemory]) -> GpuMemory:
    """Returns the GPU that `name` identifies: by its index in decimal digits, or by the beginning of its UUID. A slice of a GPU has
    only a UUID. Raises LookupError if no GPU or several match."""
    if name.isdigit():
        found = [gpu for gpu in gpus if gpu.index == int(name) and not gpu.is_slice]
    else:
        found = [gpu for gpu in gpus if gpu.uuid.lower().startswith(name.lower())]
    if len(found) == 1:
        return found[0]
    known = ", ".join(gpu.uuid if gpu.is_slice else f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise LookupError(f"{'more than one GPU' if found else 'no GPU'} is {name!r}; the driver has {known}")
