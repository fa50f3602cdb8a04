"""The receipt of a pulled folder: the file `.pull.json`, which describes what was pulled. The catalog ignores it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from daemon.cli.pull.plan import Repo, RepoFile

NAME = ".pull.json"


class Receipt(msgspec.Struct, frozen=True):
    """A description of what was pulled into a folder. files: name -> (size in bytes, digest)."""

    repo: str
    commit: str
    files: dict[str, tuple[int, str]]

    def is_complete(self, folder: Path) -> bool:
        return all(self.has(folder, name) for name in self.files)

    def has(self, folder: Path, name: str) -> bool:
        """Returns whether `folder` has the file `name` of the receipt, with the right size."""
        try:
            return (folder / name).stat().st_size == self.files[name][0]
        except OSError:
            return False


def read(folder: Path) -> Receipt | None:
    """Returns the receipt in the folder; None if there is none or it cannot be read."""
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Receipt)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def write(folder: Path, repo: Repo, files: Iterable[RepoFile]) -> None:
    """Writes a receipt of these files of a repository's commit into the folder. Raises OSError."""
    receipt = Receipt(repo.name, repo.commit, {file.name: (file.size_bytes, file.digest) for file in files})
    path = folder / (NAME + ".new")
    try:
        path.write_bytes(msgspec.json.encode(receipt))
        os.replace(path, folder / NAME)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
