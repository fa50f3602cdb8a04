"""Which devices a node has, and what of their memory is its own: `--device` against the machine and its GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from config import units
from config.load import ConfigError, located
from config.schema import DeviceBudget, NodeConfig

DEFAULT_CPU_PERCENT = 50
MIN_CHUNKS = 8
CUDA_LEFT_BYTES = 1 << 30  # of a GPU, beside the default budget: the context, torch's own and what libraries load


@dataclass(slots=True, frozen=True)
class GpuMemory:
    """One GPU as the driver numbers it (in the order of the bus). total_bytes: without what the driver keeps for itself."""

    index: int
    uuid: str
    total_bytes: int


class NoGpus(Exception):
    """The driver tells of none: why."""


def no_driver() -> Sequence[GpuMemory]:
    raise NoGpus("this process was given no way to ask for GPUs")


def device_budgets(
    config: NodeConfig,
    memory_bytes: int,
    source: str = "flags",
    gpus: Callable[[], Sequence[GpuMemory]] = no_driver,
) -> list[DeviceBudget]:
    """The node's devices; one `cpu:0` with half of the machine's memory when none is named. gpus: asked only where a cuda device
    is named; raises NoGpus. Raises ConfigError for a device that is named twice or is not there, or whose budget is below
    8 chunks or above its memory."""
    try:
        return _device_budgets(config, memory_bytes, source, gpus)
    except ConfigError as error:
        raise located(error) from None


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
        uuid, total_bytes = "", memory_bytes
        if name.startswith("cuda"):
            try:
                gpu = _gpu(name.partition(":")[2], gpus())
            except (NoGpus, LookupError) as error:
                raise ConfigError(source, "device", f"{text!r}: {error}") from None
            uuid, total_bytes = gpu.uuid, gpu.total_bytes
            other = next((device.name for device in devices.values() if device.uuid == uuid), None)
            if other is not None:
                raise ConfigError(source, "device", f"{text!r} is the same GPU as {other}, {uuid}")
        try:
            budget_bytes = units.parse_budget(amount, total_bytes) if amount else max(0, total_bytes - CUDA_LEFT_BYTES)
        except ValueError as error:
            raise ConfigError(source, "device", f"{text!r}: the budget {error}") from None
        least = MIN_CHUNKS * units.parse_bytes(config.chunk_bytes)
        if budget_bytes < least:
            raise ConfigError(
                source, "device", f"{text!r}: the budget must be at least 8 chunks of chunk_bytes, {units.format_bytes(least)}"
            )
        if uuid and budget_bytes > total_bytes:
            has = units.format_bytes(total_bytes)
            raise ConfigError(source, "device", f"{text!r}: the budget is {units.format_bytes(budget_bytes)}, the GPU has {has}")
        devices[name] = DeviceBudget(name, budget_bytes, uuid)
    total = sum(device.budget_bytes for device in devices.values() if not device.uuid)
    if total > memory_bytes:
        raise ConfigError(
            source,
            "device",
            f"the budgets together are {units.format_bytes(total)}, the machine has {units.format_bytes(memory_bytes)}",
        )
    return list(devices.values())


def _gpu(name: str, gpus: Sequence[GpuMemory]) -> GpuMemory:
    """By number, or by the beginning of its UUID. Raises LookupError."""
    found = [gpu for gpu in gpus if (gpu.index == int(name) if name.isdigit() else gpu.uuid.lower().startswith(name.lower()))]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise LookupError(f"{'more than one GPU' if found else 'no GPU'} is {name!r}; the driver has {known}")
