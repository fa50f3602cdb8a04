"""Replaces the content of a file atomically: after a power failure the file has either the old or the new content."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def partial(path: Path) -> Path:
    """Returns the path of the temporary file in which the new content of `path` is written before it replaces the old."""
    return path.with_name(path.name + ".new")


def write(path: Path, data: bytes) -> None:
    """Replaces the content of the file at `path` atomically; the file gets mode 0600. Blocks (fsync), so call it from a thread.
    Raises OSError; the old content stays then, unless only the folder could not be synced."""
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
