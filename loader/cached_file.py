"""Writes the files of the cache folder, in which measured speeds and choices are kept for the next process."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, data: bytes) -> None:
    """Replaces a file of the cache folder atomically, so that no process reads an unfinished file; several processes may do so at
    the same time. The file is not synced to the drive, so after a power failure it may be empty or damaged. Raises OSError if it
    cannot be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)
