"""Replaces a file atomically: after a power failure it has the old or the new content."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def partial(path: Path) -> Path:
    """Returns the path under which a new file is written before it replaces the old one."""
    return path.with_name(path.name + ".new")


def write(path: Path, data: bytes) -> None:
    """Replaces the file, with mode 0600. It blocks (fsync), so call it from a thread. Raises OSError, and then removes the
    incomplete new file."""
    try:
        fd = os.open(partial(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            left = memoryview(data)
            while left:  # if the disk is nearly full, a write may be incomplete
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        partial(path).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial(path).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
