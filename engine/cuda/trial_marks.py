"""Files by which engines tell the next one that a trial on the GPU ended the process: each exists while its engine makes a trial
that may do so, and the engine holds a lock on it. A file without a lock is that of an engine that has ended in its trial.
"""

from __future__ import annotations

import fcntl
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class TrialMark:
    """The files for trials of one kind. folder: where they lie. name: what is tried, with its version; each file's name begins with
    it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def left(self) -> Path | None:
        """Returns the file of an engine that has ended in its trial. Returns None if there is none."""
        return next(
            (path for path in sorted(self._folder.glob(f"{glob.escape(self._name)}-is-tried-*")) if _has_no_owner(path)), None
        )

    @contextmanager
    def set(self) -> Iterator[None]:
        """Returns a context in which this process's file exists. The file stays if the context ends with an error, or if the
        process ends in it. Raises OSError if the file cannot be made."""
        path = self._folder / f"{self._name}-is-tried-{os.getpid()}"
        unlocked = path.with_name(f".{path.name}")  # another name, so that no engine finds the file before it is locked
        with unlocked.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.replace(path)
            yield
            with suppress(OSError):
                path.unlink()


def _has_no_owner(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return path.exists()
    except OSError:  # locked, or removed meanwhile
        return False
