"""Prepares free memory in idle time, so that a load or growing KV finds huge pages and causes no page faults.

Zeroing fresh memory takes longer than reading weights into it, and drives read three times as fast into pages of 2 MiB as into
small ones. So while nothing runs, first free chunks, then the slots of the host tier are put into huge pages. The engine looks for
messages after each chunk or slot. Contents are never changed.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np

from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_tier import HostTier
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.plan import BoolArray

log = logging.getLogger("engine")

AFTER_IDLE_S = 2.0
SHARE = 0.25  # share of idle time spent preparing, so that an idle engine leaves the machine to others
MIN_AVAILABLE = 0.25  # this share of the system's memory is never taken this way
_LOOK_EVERY_BYTES = 256 << 20


class Preparer:
    """Prepares one device's free chunks, and then the host tier's slots: gives them memory in huge pages before they are used. At
    most as many chunks get memory as the chunk pool allows (resident_limit). tier: None: there is no host tier. Not thread-safe."""

    def __init__(self, memory: ChunkMemory, chunks: ChunkPool, tier: HostTier | None) -> None:
        self._memory, self._chunks, self._tier = memory, chunks, tier
        self._tried: BoolArray = np.zeros(chunks.num_chunks, np.bool_)
        self._next_slot = 0
        self._wait_s = AFTER_IDLE_S
        self._unchecked_bytes = 0
        self._stopped = False
        self._told = True
        self.prepared_bytes = 0
        self.huge_bytes = 0

    def wait_s(self) -> float | None:
        """Returns how many seconds the engine must have been idle before the next `step`; None if there is nothing left to
        prepare."""
        return None if self._stopped or (self._next() is None and self._slots_done) else self._wait_s

    def disturbed(self) -> None:
        """Makes the next `step` wait for the full idle time (AFTER_IDLE_S) again. Called when the engine had something to do."""
        self._wait_s = AFTER_IDLE_S

    def step(self) -> None:
        """Prepares the next free chunk, or the next slot of the host tier if all free chunks are prepared."""
        started_s = time.monotonic()
        chunk = self._next()
        if chunk is not None:
            self._tried[chunk] = self._chunks.resident[chunk] = True
            self._note(self._memory.prepare(chunk), self._memory.chunk_bytes)
        elif self._tier is not None and not self._slots_done:
            self._note(self._tier.prepare(self._next_slot), self._tier.slot_bytes)
            self._next_slot += 1
        self._wait_s = (time.monotonic() - started_s) * (1 / SHARE - 1)
        if not self._told and self.wait_s() is None:
            self._told = True
            why = ": the system has little left" if self._stopped else ""
            text = "prepared %d MiB of memory, %d MiB of it in huge pages%s"
            log.info(text, self.prepared_bytes >> 20, self.huge_bytes >> 20, why)

    @property
    def _slots_done(self) -> bool:
        return self._tier is None or self._next_slot >= self._tier.num_slots

    def _next(self) -> int | None:
        self._tried &= self._chunks.resident  # chunks whose memory went back to the system are no longer prepared
        wanted = self._chunks.free & ~self._tried
        if np.count_nonzero(self._chunks.resident) >= self._chunks.resident_limit:
            wanted &= self._chunks.resident
        return int(np.argmax(wanted)) if wanted.any() else None

    def _note(self, huge_bytes: int, num_bytes: int) -> None:
        self.prepared_bytes += num_bytes
        self.huge_bytes += huge_bytes
        self._unchecked_bytes += num_bytes
        self._told = False
        if self._unchecked_bytes >= _LOOK_EVERY_BYTES:
            self._unchecked_bytes = 0
            self._stopped = _available() < MIN_AVAILABLE


def _available() -> float:
    """Returns the fraction of the system's memory that is available to programs without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    amounts = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return amounts["MemAvailable"] / amounts["MemTotal"]
