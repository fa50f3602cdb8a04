"""Allocates the staging slots of a process: a few buffers on huge pages, through which weights go from a file to a device.

Huge pages matter because a drive accepts only few memory segments per request, and every ordinary page is a segment. With ordinary
pages the measured speed is about half (docs/performance.md).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

log = logging.getLogger("loader")

HUGE_PAGE_BYTES = 2 << 20
NUM_SLOTS = 4
# A slot is as long as the longest read. Drives of virtual machines finish all their current reads at once and are then idle until
# the next one arrives, so the longer the reads, the less the time between them costs (measured: 16 MiB take 2 % less time than 8,
# and two thirds of the CPU time). Yet four slots together must not take much memory.
SLOT_BYTES = 16 << 20
MAP_AGAIN_S = 0.25  # how often a thread that waits for a slot tries again to map one that could not be mapped
_THP_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class StagingRing:
    """The staging slots of a process: `num_slots` buffers of `slot_bytes` bytes each, which all loads share. The system provides
    the memory of a page when the page is first touched. Raises MemoryError if the slots cannot be mapped."""

    def __init__(self, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        try:
            self._map = mmap.mmap(-1, num_slots * slot_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"can't map {num_slots} staging slots of {slot_bytes} bytes: {error.strerror}") from None
        self._map.madvise(mmap.MADV_DONTFORK)  # a fork during a direct read could leave what is read to the child
        self.huge_pages = huge_pages_enabled()
        if self.huge_pages:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.slot_bytes = slot_bytes
        whole = np.frombuffer(self._map, np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE_BYTES
        self._bytes = whole[start : start + num_slots * slot_bytes]
        self._begin = self._bytes.ctypes.data
        self._lost: set[int] = set()  # addresses of slots that a read holds which does not return
        self._num_too_many = 0  # further slots that stand in for one that came back
        self._num_missing = 0  # further slots that could not be mapped yet
        self._lock = threading.Lock()  # of the three above
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for slot in range(num_slots):
            self._free.put(self._bytes[slot * slot_bytes : (slot + 1) * slot_bytes].data)

    @property
    def span(self) -> tuple[int, int]:
        """The memory range that all slots make up: (address, length in bytes)."""
        return self._begin, len(self._bytes)

    def prepare(self) -> None:
        """Touches every page of the slots, so that the first load does not have to wait until the system provides the memory."""
        self._bytes[:: mmap.PAGESIZE] = 0

    def take(self) -> memoryview:
        """Waits for a free staging slot (buffer) and returns it."""
        while True:
            with contextlib.suppress(Empty):
                return self._free.get(timeout=MAP_AGAIN_S)
            self._map_missing()

    def give_back(self, slot: memoryview) -> None:
        """Makes a staging slot (buffer) free again for `take`. May be called from any thread, once nothing reads from the slot any
        more."""
        with self._lock:
            if self._lost and _address(slot) in self._lost:
                self._lost.discard(_address(slot))
                if self._num_missing:
                    self._num_missing -= 1
                else:
                    self._num_too_many += 1
            if not self._is_too_many(slot):
                self._free.put(slot)
            for _ in range(self._free.qsize() if self._num_too_many else 0):
                with contextlib.suppress(Empty):
                    if not self._is_too_many(other := self._free.get_nowait()):
                        self._free.put(other)

    def replace(self, slot: memoryview) -> None:
        """Maps an extra staging slot (buffer) in place of `slot`, which is held by a read that does not return. If the read returns
        after all and gives its slot back, one of the extra slots is unmapped. If the system has no memory for an extra slot, `take`
        tries again later to map it."""
        with self._lock:
            self._lost.add(_address(slot))
            self._num_missing += 1
        self._map_missing()

    def _map_missing(self) -> None:
        with self._lock:
            while self._num_missing:
                try:
                    slot = self._another()
                except OSError as error:
                    log.warning("can't map a staging slot in place of one whose read does not return: %s", error.strerror)
                    return
                self._num_missing -= 1
                self._free.put(slot)

    def _is_too_many(self, slot: memoryview) -> bool:
        """Returns whether a free staging slot (buffer) is to be unmapped instead of being used again: it is one of the extra slots
        that `replace` has mapped, and more of them exist than are needed. If so, counts the slot as unmapped."""
        if not self._num_too_many or self._begin <= _address(slot) < self._begin + len(self._bytes):
            return False
        self._num_too_many -= 1
        return True

    def _another(self) -> memoryview:
        """Maps an extra staging slot on ordinary pages and returns it. Raises OSError if the system has no memory for it."""
        mapped = mmap.mmap(-1, self.slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_DONTFORK)
        return memoryview(mapped)


def _address(slot: memoryview) -> int:
    return np.frombuffer(slot, np.uint8).ctypes.data


def huge_pages_enabled() -> bool:
    """Returns whether the system's setting allows transparent huge pages for private memory."""
    try:
        return "[never]" not in _THP_ENABLED.read_text()
    except OSError:
        return False
