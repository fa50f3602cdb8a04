"""The host tier's memory: one memfd owned by the daemon, so that its content outlives every engine.

Engines get its descriptor when they are spawned. It is sealed against shrinking and growing, so no process can take pages away from
another. A page uses memory once it is written. The node scheduler decides what each slot holds.
"""

from __future__ import annotations

import fcntl
import os


class HostMemory:
    """Host memory of `num_slots` slots of `slot_bytes` each. fd: -1 if there are no slots. Raises OSError if it cannot be made."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.fd = -1
        if num_slots:
            self.fd = os.memfd_create("host-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, num_slots * slot_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def close(self) -> None:
        """Closes the daemon's descriptor. The memory is freed when the engines have ended, too."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
