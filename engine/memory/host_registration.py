"""Registers host memory with a device's driver (page-locks it), so that the copy engines read and write it by themselves. Without
that, every copy passes through the driver's own small buffers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

log = logging.getLogger("engine")

RANGE_BYTES = 256 << 20  # a call takes some tenths of a second per GiB; between two calls copies of other ranges can run

# (address, bytes)
Span = tuple[int, int]


@runtime_checkable
class RegistersHost(Protocol):
    """A ChunkMemory whose device copies faster to and from registered host memory."""

    def register_host(self, address: int, num_bytes: int) -> None:
        """Registers a range for the life of the process. Raises MemoryError or RuntimeError."""
        ...


def register(memory: RegistersHost, what: str, spans: Sequence[Span], unit_bytes: int) -> int:
    """Registers the spans range by range, logs how long it took, and returns how many bytes are registered. What cannot be
    registered is used as it is: copies of it are slower, and the log says so. what: the memory's name in the log. unit_bytes: no
    copy crosses a multiple of it, counted from a span's beginning (the driver refuses a copy that crosses the border of a
    range)."""
    range_bytes = max(1, RANGE_BYTES // unit_bytes) * unit_bytes
    done, total, began_s = 0, sum(num_bytes for _, num_bytes in spans), time.perf_counter()
    try:
        for address, num_bytes in spans:
            for at in range(0, num_bytes, range_bytes):
                size = min(range_bytes, num_bytes - at)
                memory.register_host(address + at, size)
                done += size
    except (MemoryError, RuntimeError) as error:
        log.warning("%s: %.2f of %.2f GiB are registered with the device: %s", what, done / 2**30, total / 2**30, error)
        return done
    seconds = time.perf_counter() - began_s
    log.info("%s: %.2f GiB registered with the device, %.3f s a GiB", what, total / 2**30, seconds / max(total, 1) * 2**30)
    return done
