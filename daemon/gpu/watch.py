"""Listens for the faults of the node's GPUs that the driver reports, in a thread that waits inside the driver, and passes them to
the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from config.devices import NoGpus
from config.schema import DeviceBudget
from daemon.gpu.inventory import GpuFault, Inventory
from loader.threads import Thread

log = logging.getLogger("hearthd")
LISTEN_S = 5.0
KEPT_XIDS = 32  # per GPU, the newest


class GpuWatch:
    """Listens for faults of the GPUs that the node's devices use. xids: a GPU's UUID -> the numbers of its faults (Xids) since
    `start`, oldest first, at most the last KEPT_XIDS. on_fault: called on the event loop for each device on a GPU that has a fault.
    Without a cuda device, no thread is started and the driver is not asked."""

    def __init__(
        self, inventory: Inventory, devices: Sequence[DeviceBudget], on_fault: Callable[[DeviceBudget, GpuFault], None]
    ) -> None:
        self._inventory, self._on_fault = inventory, on_fault
        self._devices = [device for device in devices if device.uuid]
        self.xids: dict[str, list[int]] = {}
        self._known_lost: set[str] = set()
        self._divided: dict[str, str] = {}  # UUID of a MIG slice -> UUID of its GPU
        self._stop = threading.Event()

    def start(self) -> None:
        """Starts the thread that listens for faults. It must be called on the event loop."""
        if self._devices:
            loop = asyncio.get_running_loop()
            # a daemon thread ends with the process, even while the driver holds it for LISTEN_S
            thread = Thread(target=self._listen, args=(loop,), name="gpu faults")
            try:
                thread.start()
            except MemoryError as error:
                _warn(error)

    def stop(self) -> None:
        self._stop.set()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(NoGpus):  # the loop below meets the same error
            self._divided = {gpu.uuid: gpu.slice_of for gpu in self._inventory.gpus() if gpu.slice_of}
        while not self._stop.is_set():
            try:
                fault = self._inventory.next_fault(LISTEN_S)
                if fault is None or self._stop.is_set():
                    continue
                hit = [fault.uuid] if fault.uuid else self._lost()
                if not hit:  # the fault was already reported; the driver may repeat it at once
                    self._stop.wait(LISTEN_S)
            except NoGpus as error:
                _warn(error)
                return
            with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile
                for uuid in hit:
                    loop.call_soon_threadsafe(self._tell, uuid, fault)

    def _lost(self) -> list[str]:
        """Returns the UUIDs of the node's GPUs that the driver has stopped listing since the previous call. A fault that names no
        GPU is taken to be theirs."""
        there = {gpu.uuid for gpu in self._inventory.gpus()}
        ours = dict.fromkeys(device.uuid for device in self._devices)  # each once: a device and its carve-outs share a GPU
        lost = [uuid for uuid in ours if uuid not in there | self._known_lost]
        self._known_lost = self._known_lost - there | set(lost)
        return lost

    def _tell(self, uuid: str, fault: GpuFault) -> None:
        known = self.xids.setdefault(uuid, [])
        known.append(fault.xid)
        del known[:-KEPT_XIDS]
        for device in self._devices:
            if uuid in (device.uuid, self._divided.get(device.uuid)):  # the driver reports the GPU, whose slices may be devices
                self._on_fault(device, fault)


def _warn(error: Exception) -> None:
    log.warning("faults of GPUs will not be told of: %s", error)
