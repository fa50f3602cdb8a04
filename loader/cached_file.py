"""Writes files of the cache folder, which keeps measured speeds and choices for later processes."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, data: bytes) -> None:
    """Replaces a file of the cache folder atomically: no other process ever sees a part of the new content, even if several
    processes replace the file at the same time. The file is not synced to the drive, so after a power failure it may be empty or
    damaged. Raises OSError if it cannot be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)
