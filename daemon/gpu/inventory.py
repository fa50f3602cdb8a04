"""The node's GPUs as the driver tells of them, whoever asks it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from config.devices import GpuMemory, NoGpus
from config.schema import DeviceBudget
from config.units import format_bytes

HOLDERS_NAMED = 5

# Faults after which nothing that runs on the GPU can be trusted to go on, or to come back from a call: the engine is ended. After
# others the driver ends what was at fault itself, and CUDA tells that process. Source: NVIDIA, "XID Errors".
FATAL_XIDS = {
    48: "uncorrectable memory error",
    62: "the GPU's own controller halted",
    64: "a bad memory row could not be taken out of use",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "too many memory errors",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    140: "unrecovered memory error",
    143: "the GPU could not be set up",
    154: "the GPU has to be reset",
}


@dataclass(slots=True, frozen=True)
class GpuProcess:
    """used_bytes: None where the driver does not say."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(slots=True, frozen=True)
class Gpu:
    """One GPU now; None where it has no such sensor, or where asking for it failed (`error` says so then).

    total_bytes: without what the driver keeps for itself. ecc_errors: memory errors since the driver was loaded that could not be
    corrected. faulty_rows: memory rows taken out of use for them. problem: what its memory says of itself that needs a reset or a
    repair."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int = 0
    temperature_c: int | None = None
    utilisation_percent: int | None = None
    power_w: float | None = None
    ecc_errors: int | None = None
    faulty_rows: int | None = None
    problem: str = ""
    processes: tuple[GpuProcess, ...] = ()

    @property
    def memory(self) -> GpuMemory:
        return GpuMemory(self.index, self.uuid, self.total_bytes)


@dataclass(slots=True, frozen=True)
class GpuFault:
    """An Xid the driver has reported. uuid: "" where it does not say of which GPU."""

    uuid: str
    xid: int

    @property
    def is_fatal(self) -> bool:
        return self.xid in FATAL_XIDS

    def __str__(self) -> str:
        return f"Xid {self.xid}" + (f" ({FATAL_XIDS[self.xid]})" if self.is_fatal else "")


class Inventory(Protocol):
    """Whom to ask for GPUs. Every call may block for some milliseconds, and may come from any thread."""

    def gpus(self) -> Sequence[Gpu]:
        """All of the machine's. Raises config.devices.NoGpus where there is no driver."""
        ...

    def next_fault(self, timeout_s: float) -> GpuFault | None:
        """Blocks until one is reported, None after timeout_s. Raises NoGpus where none can be."""
        ...


def memories(inventory: Inventory) -> list[GpuMemory]:
    """For config.devices. Raises NoGpus."""
    return [gpu.memory for gpu in inventory.gpus()]


def holders(gpu: Gpu, not_pids: Collection[int] = ()) -> str:
    """Who holds a GPU's memory, the largest first; "" if nobody else is known to."""
    others = sorted((one for one in gpu.processes if one.pid not in not_pids), key=lambda one: -(one.used_bytes or 0))
    told = [f"pid {one.pid} {one.name} {'?' if one.used_bytes is None else format_bytes(one.used_bytes)}" for one in others]
    more = [f"{len(told) - HOLDERS_NAMED} more"] if len(told) > HOLDERS_NAMED else []
    return ", ".join(told[:HOLDERS_NAMED] + more)


def why_no_memory(inventory: Inventory, device: DeviceBudget, error: str) -> str:
    """What stands in the way of a device's budget, for its operator. Blocks."""
    text = f"the driver cannot give {format_bytes(device.budget_bytes)} ({error})"
    try:
        gpu = next((one for one in inventory.gpus() if one.uuid == device.uuid), None)
    except NoGpus as unknown:
        return f"{text}; who holds its memory is not known: {unknown}"
    if gpu is None:
        return f"{text}; the driver has no {device.uuid} any more"
    free = format_bytes(gpu.total_bytes - gpu.used_bytes)
    return f"{text}: {free} of {format_bytes(gpu.total_bytes)} are free, held by {holders(gpu) or 'nobody the driver names'}"


def rows_of(gpus: Sequence[Gpu], devices: Sequence[DeviceBudget], faults: dict[str, list[int]]) -> list[dict[str, Any]]:
    """What `hearth gpus --json` prints. device: the node's name for it, "" where it does not use it; xids: seen since its start."""
    found = []
    for gpu in gpus:
        parts = [device for device in devices if device.uuid and device.uuid == gpu.uuid]  # the device itself, and its carve-outs
        use = {
            "device": parts[0].hardware if parts else "",
            "budget_bytes": sum(part.budget_bytes for part in parts),
        }
        found.append(asdict(gpu) | use | {"xids": list(faults.get(gpu.uuid, ()))})
    return found
