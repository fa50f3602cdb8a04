"""A few buffers on huge pages that reads pass through on their way to a device, made once per process.

Huge pages matter: a drive takes few segments per request, and an ordinary page is a segment each (measured: a third of the speed).
"""

from __future__ import annotations

import mmap
from pathlib import Path
from queue import SimpleQueue

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
NUM_SLOTS = 4
# A slot is as long as the longest read. Drives of virtual machines end all reads under way at once and stand still until the next
# one comes, so what happens between two reads costs the less the longer they are (measured: 16 MiB are 2 % sooner than 8, at two
# thirds of the CPU time); four slots are to be no memory to speak of.
SLOT_BYTES = 16 << 20
_THP_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class StagingRing:
    """`num_slots` buffers of `slot_bytes`, shared by all loads of a process. Pages exist once touched. Raises MemoryError."""

    def __init__(self, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        try:
            self._map = mmap.mmap(-1, num_slots * slot_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"can't map {num_slots} staging slots of {slot_bytes} bytes: {error.strerror}") from None
        self.huge_pages = huge_pages_enabled()
        if self.huge_pages:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.slot_bytes = slot_bytes
        whole = np.frombuffer(self._map, np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE_BYTES
        self._bytes = whole[start : start + num_slots * slot_bytes]
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for slot in range(num_slots):
            self._free.put(self._bytes[slot * slot_bytes : (slot + 1) * slot_bytes].data)

    @property
    def span(self) -> tuple[int, int]:
        """(address, bytes) of all slots."""
        return self._bytes.ctypes.data, len(self._bytes)

    def prepare(self) -> None:
        """Touches every page; otherwise the first load does, and waits for it."""
        self._bytes[:: mmap.PAGESIZE] = 0

    def take(self) -> memoryview:
        """Waits for a free slot."""
        return self._free.get()

    def give_back(self, slot: memoryview) -> None:
        """From any thread, once nothing reads from it any more."""
        self._free.put(slot)


def huge_pages_enabled() -> bool:
    """Whether private memory may have huge pages at all."""
    try:
        return "[never]" not in _THP_ENABLED.read_text()
    except OSError:
        return False
