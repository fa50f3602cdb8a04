"""Locks the state folder, so that two daemons do not overwrite what the other one has saved there."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

log = logging.getLogger("hearthd.state")
NAME = "hearthd.lock"


def lock(folder: str) -> None:
    """Locks a state folder for the rest of this process's life; the system frees the lock however the process ends. Child processes
    do not hold the lock, so engines that outlive a daemon do not keep the next daemon from starting. Where the file system has no
    locks, or the folder cannot be written to, nothing is locked.

    Raises OSError, which names the setting and the other daemon's process, if another daemon has locked the folder."""
    path = Path(folder) / NAME
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.debug("%s: %s; nobody is kept from using the folder, too", path, error.strerror)
        return
    try:
        # a lock by record, which belongs to this process alone; one by flock would be shared by all that it forks. It is freed when
        # the process closes any descriptor of the file, so the file is opened nowhere else, and this one stays open
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.read(fd, 20).decode(errors="replace").strip()
        os.close(fd)
        who = f"process {holder}" if holder.isdecimal() else "another one"
        raise OSError(f"state_dir {folder}: another hearthd uses it ({who}); name another with --state-dir DIR") from None
    except OSError as error:
        log.debug("%s cannot be locked: %s", path, error.strerror)
        os.close(fd)
        return
    try:
        os.ftruncate(fd, 0)
        os.write(fd, b"%d\n" % os.getpid())
    except OSError:
        pass  # a full disk; the lock holds without the number
