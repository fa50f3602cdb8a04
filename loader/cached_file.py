"""Writes the files of the cache folder, in which measured speeds and choices are kept for the next process."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, data: bytes) -> None:
    """Replaces a file of the cache folder at once, so that no process reads a part of it; several processes may replace it at the
    same time. It is not synced: after a power failure the file may be empty or damaged, as any file of that folder. Raises
    OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)
