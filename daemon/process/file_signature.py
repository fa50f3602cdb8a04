"""Tells whether one of a few files may have changed."""

from __future__ import annotations

import os
from collections.abc import Sequence

Signature = tuple[tuple[int, int, int] | None, ...]


def signature(paths: Sequence[str]) -> Signature:
    """Returns, for each path, the file's modification time, size and inode, or None if there is no such file. The value differs
    from an earlier one if the content of one of the files may have changed."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)


def signature_text(path: str) -> str:
    """Returns the signature of one file as text; MISSING if it is not there or may not be looked at."""
    return str(signature([path]))


MISSING = str((None,))
