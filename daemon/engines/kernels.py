"""Handles the engines' reports on compiling kernels. While a device's kernels are being compiled, its models are slower, or a load
waits for the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `hearth` uses only `sentence`
    from daemon.record.event_ring import EventRing
    from engine.protocol import KernelsTold


class Kernels:
    """The last report on compiling kernels from the engine of each device. ring: receives an event when a compilation begins or
    ends."""

    def __init__(self, ring: EventRing) -> None:
        self._ring = ring
        self._told: dict[str, KernelsTold] = {}

    def told(self, device: str, message: KernelsTold) -> None:
        before = self._told.get(device)
        self._told[device] = message
        if message.kind and (before is None or before.kind != message.kind):
            self._ring.add("kernels", device=device, state="compiling", kind=message.kind, left_s=message.left_s)
        elif not message.kind:
            self._ring.add("kernels", device=device, state="failed" if message.problem else "in use", reason=message.problem)

    def forget(self, device: str) -> None:
        """Drops the device's report because its engine is gone; the next engine reports anew."""
        self._told.pop(device, None)

    def row(self, device: str) -> dict[str, Any] | None:
        """Returns the progress of compiling the device's kernels, as fields of the status output, or None if there is nothing to
        compile. `postponed`: whether the compilation waits until the device is idle or a request needs the kernels."""
        told = self._told.get(device)
        if told is None or not told.kind:
            return None
        progress = {"kind": told.kind, "done": told.num_done, "total": told.num_units, "left_s": told.left_s}
        return progress | {"loads_wait": told.loads_wait, "postponed": told.postponed}

    def problem(self, device: str) -> str:
        """Returns why the device's kernels cannot be compiled or used, or "" if there is no problem."""
        told = self._told.get(device)
        return "" if told is None else told.problem

    def sentence(self) -> str:
        """Returns a text to append to a message: one sentence for each device whose kernels are being compiled now, so that models
        are slower or a load waits; "" if there is none."""
        rows = ((device, self.row(device)) for device in self._told)
        return " ".join(f"{sentence(device, row)}." for device, row in rows if row is not None and not row["postponed"])


def sentence(device: str, row: dict[str, Any]) -> str:
    """Returns the progress of one device's compilation in words, without a full stop. row: the progress as a dict, from
    Kernels.row."""
    left = f"about {row['left_s']:.0f} s left" if row["left_s"] >= 1 else "nearly done"
    done = f"{row['done']} of {row['total']}, {left}" if row["total"] else left
    if row.get("postponed"):
        when = "will be compiled as soon as it is idle or a request needs them"
        return f"{device}: kernels for {row['kind']} {when} ({done})"
    slower = "requests that sample" if row["kind"] == "sampling" else "models"
    until_then = "its load cannot end" if row.get("loads_wait") else f"{slower} are slower"
    return f"{device}: kernels for {row['kind']} are being compiled ({done}); until then {until_then}"
