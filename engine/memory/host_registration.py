"""Registers host memory with a device's driver (page-locks it), so that the device's copy engines can read and write it directly.
Without registration, every copy passes through small buffers of the driver.

While the driver registers a range, calls of other threads to the driver wait. Most of that time would be spent on page faults: an
H100's host takes 0.6 s for a GiB of untouched memory, but 0.115 s if its pages exist. So another system call makes the pages before
the driver registers them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from engine.memory import mappings

log = logging.getLogger("engine")

RANGE_BYTES = 64 << 20  # registered in one call; the driver takes about 7 ms, during which other threads' calls wait
POPULATED_BYTES = 16 << 20  # populated in one call, during which changes of the process's address space wait
BACKGROUND_SHARE = 0.25  # share of the time spent in the driver when registration runs beside loads and steps

# (address, bytes)
Span = tuple[int, int]


@runtime_checkable
class RegistersHost(Protocol):
    """A ChunkMemory whose device copies faster to and from host memory that is registered with its driver."""

    def register_host(self, address: int, num_bytes: int) -> None:
        """Registers num_bytes of host memory, from `address` on, with the device's driver, for the life of the process or until
        `unregister_host`. Raises MemoryError or RuntimeError if the driver refuses."""
        ...

    def unregister_host(self, address: int, memory: object) -> None:
        """Ends the registration of the memory that begins at `address`. Returns at once; the registration ends when all steps
        launched so far have ended. memory: the object that keeps the memory mapped, which is kept until then. If the driver
        refuses, this is logged, and `memory` is kept for the life of the process."""
        ...


def register(memory: RegistersHost, what: str, spans: Sequence[Span], unit_bytes: int, share: float = 1.0) -> int:
    """Registers host memory with the device's driver, range by range, logs how long it took, and returns how many bytes are
    registered. The memory's content is kept. Memory that cannot be registered can still be used, but is copied more slowly; the log
    says so.
    what: the memory's name in the log.
    spans: (address, bytes) of each stretch of memory.
    unit_bytes: the caller promises that no copy crosses a multiple of this number, counted from a span's beginning, because the
    driver refuses a copy that crosses the border of a registered range.
    share: the largest fraction of time that the thread spends in the driver; it sleeps between ranges, so that other threads can
    call the driver."""
    range_bytes = max(1, RANGE_BYTES // unit_bytes) * unit_bytes
    ranges = [
        (address + at, min(range_bytes, num_bytes - at)) for address, num_bytes in spans for at in range(0, num_bytes, range_bytes)
    ]
    done, total, began_s = 0, sum(num_bytes for _, num_bytes in spans), time.perf_counter()
    populates, populating_s, registering_s, next_s = True, 0.0, 0.0, began_s
    try:
        for address, num_bytes in ranges:
            started_s = time.perf_counter()
            populates = populates and _populate(address, num_bytes)
            populated_s = time.perf_counter()
            populating_s += populated_s - started_s
            time.sleep(max(0.0, next_s - populated_s))
            started_s = time.perf_counter()
            memory.register_host(address, num_bytes)
            seconds = time.perf_counter() - started_s
            registering_s += seconds
            next_s = started_s + seconds / share
            done += num_bytes
    except (MemoryError, RuntimeError) as error:
        log.warning("%s: %.2f of %.2f GiB are registered with the device: %s", what, done / 2**30, total / 2**30, error)
        return done
    per_gib = 2**30 / max(total, 1)
    log.info(
        "%s: %.2f GiB registered with the device in %.1f s, %.3f s a GiB: %.3f making pages%s, %.3f in the driver",
        what,
        total / 2**30,
        time.perf_counter() - began_s,
        (populating_s + registering_s) * per_gib,
        populating_s * per_gib,
        "" if populates else " (the system refused to make them all)",
        registering_s * per_gib,
    )
    return done


def register_whole(memory: RegistersHost, what: str, address: int, num_bytes: int) -> bool:
    """Registers num_bytes of host memory in one call, for small memory. Returns whether it is registered; if not, the log says why.
    what: the memory's name in the log."""
    try:
        _populate(address, num_bytes)
        memory.register_host(address, num_bytes)
    except (MemoryError, RuntimeError) as error:
        log.warning("%s: not registered with the device: %s", what, error)
        return False
    return True


def _populate(address: int, num_bytes: int) -> bool:
    """Makes the system provide memory for every page of a range, in several calls; the pages' content is kept. Returns False if the
    system refuses; registration then takes longer, because the driver makes the pages."""
    pieces = range(address, address + num_bytes, POPULATED_BYTES)
    return all(mappings.populate(at, min(POPULATED_BYTES, address + num_bytes - at)) for at in pieces)
