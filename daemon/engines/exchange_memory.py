"""Creates and manages the exchange memory: the memory that engines share to run models that are split over several devices
(engine/exchange.py).

The daemon owns the memory and the doorbells (eventfds that wake an engine), so they outlive every engine. It numbers the engines.
The engines of one split model are a group; the daemon gives each group a region (a part of the memory) for as long as one of its
engines may use it, and marks the group as broken when one of its engines has ended. A new daemon makes a new memory, because its
engines are new as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from config.device_names import host_of
from config.parallel import by_kind
from config.schema import DeviceBudget
from engine.exchange import Exchange, first_region, make_exchange

MOST_BYTES = 1 << 40  # address space for regions; memory is only used for pages that are touched


class ExchangeMemory:
    """The exchange memory, which the engines of `devices` share to run split models. The engines are numbered in the order of
    `devices`. fd: the memory's descriptor. doorbells: one eventfd for each engine, by its number. Raises OSError if the memory or
    an eventfd cannot be made."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._numbers = {device: number for number, device in enumerate(devices)}
        self.fd = make_exchange(len(devices))
        self.doorbells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in devices]
        self._exchange = Exchange(self.fd)
        self._begin = first_region(len(devices))
        self._taken: dict[int, int] = {}  # offset of each region in use -> its end

    def close(self) -> None:
        """Closes the daemon's descriptors. The system frees the memory when the engines have closed theirs, too."""
        self._exchange.close()
        for fd in (self.fd, *self.doorbells):
            os.close(fd)

    def number(self, device: str) -> int:
        """Returns the number by which a device's engine is known in the memory that engines share to run split models. Raises
        KeyError for a device over which no model can be split."""
        return self._numbers[device]

    def arguments(self, device: str) -> tuple[list[str], list[int]]:
        """Returns an engine's command-line arguments for the memory that engines share to run split models, and the descriptors
        that it inherits; empty lists for a device over which no model is split."""
        if device not in self._numbers:
            return [], []
        bells = ",".join(map(str, self.doorbells))
        told = ["--exchange-fd", str(self.fd), "--engine-number", str(self._numbers[device]), "--doorbell-fds", bells]
        return told, [self.fd, *self.doorbells]

    def allocate(self, num_bytes: int) -> int:
        """Takes a region of num_bytes bytes for the engines of a split model and returns its offset in the memory; the region's
        bytes are zero. Raises OSError if there is no room left."""
        offset = self._begin
        for begin, end in sorted(self._taken.items()):
            if begin - offset >= num_bytes:
                break
            offset = end
        if offset + num_bytes > MOST_BYTES:
            raise OSError(f"the exchange memory has no room for {num_bytes} bytes more")
        self._exchange.clear(offset, num_bytes)
        self._taken[offset] = offset + num_bytes
        return offset

    def free(self, offset: int) -> None:
        """Frees the region (part of the memory) that begins at `offset`, so that another split model can get it. No engine may use
        it any more."""
        end = self._taken.pop(offset)
        self._exchange.clear(offset, end - offset)

    def break_group(self, offset: int) -> None:
        self._exchange.break_group(offset)


def exchange_memory(devices: Sequence[DeviceBudget]) -> ExchangeMemory | None:
    """Returns the memory that engines share to run split models, or None if no model can be split over `devices`. Models can be
    split over the devices of one kind (cpu or cuda) if there are at least two of that kind, or if one of them belongs to another
    host."""
    there = by_kind(device.name for device in devices if not device.model)
    names = [name for of_kind in there.values() if len(of_kind) > 1 or any(map(host_of, of_kind)) for name in of_kind]
    return ExchangeMemory(names) if names else None
