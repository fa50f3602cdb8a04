"""Scans the folder of a registered model again before its weights are read, and opens a weight file only if it is the one that the
scan saw.
"""

from __future__ import annotations

import os
from pathlib import Path

from loader.errors import CheckpointChanged
from loader.files.regular_file import open_regular
from loader.files.weight_files import FileInfo
from loader.models.catalog import Checkpoint, scan_one


def scanned_again(path: str | Path, fingerprint: str, kind: str, name: str = "") -> Checkpoint:
    """Scans the folder of a registered model, adapter or draft head again, and returns its checkpoint, which is complete.
    fingerprint: the fingerprint with which it was registered; "" accepts any. kind: "model", "adapter" or "head", for messages.
    name: the name by which it is registered; "": the folder's name. Raises CheckpointError for files that are not valid, and
    CheckpointChanged if the files differ from the registered ones or are incomplete."""
    try:
        checkpoint = scan_one(path, name or None)
    except OSError as error:
        raise CheckpointChanged(f"{path}: {error.strerror}") from None
    if checkpoint.failure is not None:
        raise checkpoint.failure
    if not checkpoint.complete:
        raise CheckpointChanged(f"{path}: incomplete: {checkpoint.fault}")
    if fingerprint and checkpoint.fingerprint != fingerprint:
        raise CheckpointChanged(f"{path}: files changed since the {kind} was registered")
    return checkpoint


def open_unchanged(folder: str | Path, info: FileInfo, kind: str) -> int:
    """Opens a weight file and returns its descriptor, which the caller closes. info: the size and modification time that a scan
    recorded. kind: "model", "adapter" or "head", for messages. Raises CheckpointChanged if the file differs from `info` or can't be
    opened."""
    try:
        fd = open_regular(Path(folder) / info.name)
    except OSError as error:
        raise CheckpointChanged(f"{info.name}: {error.strerror}") from None
    try:
        check_unchanged(fd, info, kind)
    except CheckpointChanged:
        os.close(fd)
        raise
    return fd


def check_unchanged(fd: int, info: FileInfo, kind: str) -> None:
    """Raises CheckpointChanged if an open file has another size or modification time than the scan recorded in `info`. kind:
    "model", "adapter" or "head", for the message."""
    stat = os.fstat(fd)
    if (stat.st_size, stat.st_mtime_ns) != (info.size_bytes, info.mtime_ns):
        raise CheckpointChanged(f"{info.name}: changed since the {kind} was registered")
