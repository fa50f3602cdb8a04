"""The host tier's memory: one memfd that the daemon owns, so that what is kept there outlives every engine.

Engines get its descriptor when they are spawned. It is sealed against shrinking and growing: no process can take pages from under
another. Pages exist once they are written. Which slot holds what is scheduler/node's business.
"""

from __future__ import annotations

import fcntl
import os


class HostMemory:
    """`num_slots` slots of `slot_bytes`; fd is -1 where there are none. Raises OSError if it can't be made."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.fd = -1
        if num_slots:
            self.fd = os.memfd_create("host-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, num_slots * slot_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def close(self) -> None:
        """Gives the memory back once the engines have ended, too."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
