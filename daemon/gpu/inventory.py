"""The node's GPUs as the driver reports them, in terms that do not depend on the library with which the driver is asked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from config.devices import GpuMemory, NoGpus
from config.schema import DeviceBudget
from config.units import format_bytes

HOLDERS_NAMED = 5
MIN_CUDA = 12000  # the oldest CUDA version that the driver must support: 12.0, in NVML's form

# After these faults nothing on the GPU can be trusted to continue, or to return from a call, so the engine is ended. After
# other faults the driver itself ends the process at fault, and CUDA reports it there. Source: NVIDIA, "XID Errors".
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
    """A process that uses a GPU. used_bytes: None if the driver does not report it. is_engine: whether it is an engine of this or
    an earlier hearthd; None if that is unknown, because the process is not visible, for example from inside a container."""

    pid: int
    name: str
    used_bytes: int | None
    is_engine: bool | None = None


@dataclass(slots=True, frozen=True)
class Gpu:
    """The state of one GPU, or of a MIG slice of one. A reading, such as temperature_c, is None if the GPU has no such sensor or if
    it cannot be read.

    total_bytes: its memory without the part that the driver reserves. ecc_errors: memory errors since the driver was loaded that
    could not be corrected. faulty_rows: memory rows that were taken out of use because of errors. problem: a fault of its memory
    that needs a reset or a repair, or why the driver could not report on the GPU at all, in which case uuid is "". slice_of: the
    UUID of the GPU of which this is a slice; "" for a whole GPU. unusable: why no engine can run on it, "" if one can. note: a
    setting of the driver that operators should know about."""

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
    slice_of: str = ""
    unusable: str = ""
    note: str = ""

    @property
    def taken_bytes(self) -> int:
        """Returns the bytes of the GPU's memory that are held by processes that are certainly not engines, as far as the driver
        reports them."""
        return sum(one.used_bytes or 0 for one in self.processes if one.is_engine is False)

    @property
    def memory(self) -> GpuMemory:
        taken = min(self.taken_bytes, self.total_bytes)
        return GpuMemory(self.index, self.uuid, self.total_bytes, taken, self.unusable, bool(self.slice_of))


@dataclass(slots=True, frozen=True)
class GpuFault:
    """A fault of a GPU that the driver has reported. xid: its number (NVIDIA's Xid). uuid: the GPU's UUID, "" if the driver does
    not name the GPU."""

    uuid: str
    xid: int

    @property
    def is_fatal(self) -> bool:
        return self.xid in FATAL_XIDS

    def __str__(self) -> str:
        return f"Xid {self.xid}" + (f" ({FATAL_XIDS[self.xid]})" if self.is_fatal else "")


class Inventory(Protocol):
    """Reports the machine's GPUs and their faults. All methods may block for some milliseconds (`next_fault` for longer), and may
    be called from any thread."""

    def gpus(self) -> Sequence[Gpu]:
        """Returns all GPUs of the machine. Raises config.devices.NoGpus if there is no driver."""
        ...

    def next_fault(self, timeout_s: float) -> GpuFault | None:
        """Blocks until a fault is reported and returns it, or None after timeout_s seconds. Raises NoGpus if the driver cannot
        report faults."""
        ...


def memories(inventory: Inventory) -> list[GpuMemory]:
    """Returns the memory of each GPU, as config.devices needs it to check budgets. Raises NoGpus if there is no driver."""
    return [gpu.memory for gpu in inventory.gpus()]


def holders(gpu: Gpu, not_pids: Collection[int] = ()) -> str:
    """Returns, as text, the processes that hold a GPU's memory with their pids and sizes, the largest first; "" if none is known.
    Of more than HOLDERS_NAMED processes, only the number of the others is given. not_pids: processes to leave out."""
    others = sorted((one for one in gpu.processes if one.pid not in not_pids), key=lambda one: -(one.used_bytes or 0))
    told = [f"pid {one.pid} {one.name} {'?' if one.used_bytes is None else format_bytes(one.used_bytes)}" for one in others]
    more = [f"{len(told) - HOLDERS_NAMED} more"] if len(told) > HOLDERS_NAMED else []
    return ", ".join(told[:HOLDERS_NAMED] + more)


def held_by_others(gpu: Gpu, budget_bytes: int) -> str:
    """Returns, as text, how much of a GPU's memory is held by processes that are certainly not engines, which ones they are, and
    the budget that the device has beside them; "" if they hold none. budget_bytes: the device's budget."""
    if not gpu.taken_bytes:
        return ""
    held = holders(gpu, [one.pid for one in gpu.processes if one.is_engine is not False])
    of = f"{format_bytes(gpu.taken_bytes)} of {format_bytes(gpu.total_bytes)}"
    return f"others hold {of}: {held}; its budget is {format_bytes(budget_bytes)}"


def remarks(inventory: Inventory, devices: Sequence[DeviceBudget]) -> list[str]:
    """Returns lines for operators about the GPUs of the node's devices, for the log at the start: other processes that hold memory
    of a GPU, and unusual settings of the driver."""
    if not any(device.uuid for device in devices):
        return []
    try:
        gpus = {gpu.uuid: gpu for gpu in inventory.gpus()}
    except NoGpus as error:
        return [str(error)]
    found = []
    for device in devices:
        gpu = gpus.get(device.uuid)
        if gpu is None or not device.uuid:
            continue
        if taken := held_by_others(gpu, device.budget_bytes):
            found.append(f"{device.name}: {taken}")
        if gpu.note:
            found.append(f"{device.name}: {gpu.note}")
    return found


def why_no_memory(inventory: Inventory, device: DeviceBudget, error: str) -> str:
    """Returns a text for operators that explains why a device's budget cannot be allocated: how much of the GPU's memory is free
    and which processes hold the rest of it. For a device of another host, only the error is known. error: the driver's error. The
    call blocks."""
    if device.host:
        return f"the host {device.host} cannot give {format_bytes(device.budget_bytes)} ({error})"
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
    """Returns one dict for each GPU, which is a row of `hearth gpus --json`: the fields of Gpu, and three more. `device` is the
    node's name for the GPU, "" if the node does not use it. `budget_bytes` is how much of the GPU's memory the node may use. `xids`
    are the numbers of its faults, as in GpuWatch.xids.

    devices: the node's devices. faults: the GPU's UUID -> its faults (Xids)."""
    found = []
    for gpu in gpus:
        parts = [device for device in devices if device.uuid and device.uuid == gpu.uuid]  # the device and its carve-outs
        use = {
            "device": parts[0].hardware if parts else "",
            "budget_bytes": sum(part.budget_bytes for part in parts),
        }
        found.append(asdict(gpu) | use | {"xids": list(faults.get(gpu.uuid, ()))})
    return found
