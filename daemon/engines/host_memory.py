"""The host tier's memory: one memfd owned by the daemon, so that its content outlives every engine and a restart of the daemon.

Engines get its descriptor when they are spawned. It is sealed against shrinking and growing, so no process can take pages away from
another. A page of it takes memory only once it is written. The node scheduler decides what each slot holds.
"""

from __future__ import annotations

import fcntl
import logging
import os

from daemon.process.account import Account
from daemon.process.fd_store import FdStore

log = logging.getLogger("hearthd.engine")
STORED_AS, ACCOUNT = "host-tier", "host-tier-account"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostMemory:
    """The memory of `num_slots` slots of `slot_bytes` each. fd: its descriptor, -1 if there are no slots. Raises OSError if it
    cannot be made.

    With a service manager, the memory is kept in the FD store, together with an account of what its slots hold. account: that
    account; None without a service manager. It is empty if the memory is new, which is also the case if the stored memory had
    another size."""

    def __init__(self, num_slots: int, slot_bytes: int, store: FdStore | None = None) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.fd = -1
        self.account: Account | None = None
        if not num_slots:
            return
        found = store.take(STORED_AS) if store is not None else None
        if found is not None and not _fits(found, num_slots * slot_bytes):
            log.info("host memory of before the restart is given up: its size was not host_tier_bytes")
            os.close(found)
            found = None
        self.fd = _make(num_slots * slot_bytes) if found is None else found
        if store is not None and store.usable:
            self.account = store.account(ACCOUNT)
            if found is None:
                self.account.write(b"")
                store.put(STORED_AS, self.fd)

    def close(self) -> None:
        """Closes the daemon's descriptors. The system frees the memory when the engines and the service manager have closed theirs,
        too."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self.account is not None:
            self.account.close()
            self.account = None


def _make(num_bytes: int) -> int:
    fd = os.memfd_create("host-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def _fits(fd: int, num_bytes: int) -> bool:
    """Returns whether the descriptor is memory of this size that has the seals of the host tier's memory."""
    try:
        return os.fstat(fd).st_size == num_bytes and fcntl.fcntl(fd, fcntl.F_GET_SEALS) == _SEALS
    except OSError:
        return False
