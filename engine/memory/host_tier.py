"""Gives an engine access to the host tier, whose slots lie in a memfd that the daemon made. Their content therefore outlives the
engine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.memory import mappings


class HostTier:
    """The host tier as an engine sees it: num_slots slots of slot_bytes each, mapped from the memfd `fd`, which the constructor
    closes. The daemon decides which slot holds what. Raises ValueError if the file is too small, MemoryError if it cannot be
    mapped."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        num_bytes = num_slots * slot_bytes
        found = os.fstat(fd).st_size
        if found < num_bytes:
            raise ValueError(f"host tier: {num_slots} slots of {slot_bytes} bytes asked, the file has {found} bytes")
        self._address = mappings.reserve(num_bytes)
        mappings.map_file(self._address, num_bytes, fd, 0)
        os.close(fd)

    @property
    def span(self) -> tuple[int, int]:
        """The address of the first slot, and the number of bytes of all slots together."""
        return self._address, self.num_slots * self.slot_bytes

    def slot(self, index: int) -> Any:
        """Returns the memory of a slot, uint8 [slot_bytes]. Raises IndexError if there is no slot of this index."""
        if not 0 <= index < self.num_slots:
            raise IndexError(f"host tier: slot {index} is not among the {self.num_slots}")
        return np.frombuffer(mappings.bytes_at(self._address + index * self.slot_bytes, self.slot_bytes), np.uint8)

    def pieces(self, slots: Sequence[int], num_bytes: int) -> list[Any]:
        """Returns the memory of data of num_bytes bytes that fills these slots in order, as one uint8 array per slot; only the last
        array may be shorter than a slot. Raises ValueError if the slots together have fewer bytes, IndexError if a slot does not
        exist."""
        if len(slots) * self.slot_bytes < num_bytes:
            raise ValueError(f"{len(slots)} slots of {self.slot_bytes} bytes are too few for {num_bytes} bytes")
        size = self.slot_bytes
        return [self.slot(slot)[: num_bytes - at] for at, slot in zip(range(0, num_bytes, size), slots, strict=False)]

    def prepare(self, index: int) -> int:
        """Makes the system provide a slot's memory now, in huge pages where possible; the slot's content is kept. Returns how many
        bytes of the slot are then in huge pages."""
        address = self._address + index * self.slot_bytes
        huge = mappings.HUGE_PAGE_BYTES
        if self.slot_bytes % huge:
            return 0
        self.slot(index)[::huge].sum()  # reading a page of a memfd also gives it memory
        return mappings.collapse(address, self.slot_bytes)
