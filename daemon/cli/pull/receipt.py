"""Reads and writes the receipt of a model folder that `hearth pull` fills: the file `.pull.json`, which has the repository, the
commit, and each file's size and digest. The catalog ignores it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from daemon.cli.pull.plan import Repo, RepoFile

NAME = ".pull.json"


class Receipt(msgspec.Struct, frozen=True):
    """A description of the files that `hearth pull` downloads into a folder. files: name -> (size in bytes, digest)."""

    repo: str
    commit: str
    files: dict[str, tuple[int, str]]

    def is_complete(self, folder: Path) -> bool:
        return all(self.has(folder, name) for name in self.files)

    def has(self, folder: Path, name: str) -> bool:
        """Returns whether `folder` has the file `name`, in the size that the receipt says."""
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
    """Writes the receipt for these files of the repository's commit into the folder. A pull does so before it downloads the files,
    so that the next pull knows to which commit the files of an interrupted one belong. Raises OSError if the receipt cannot be
    written."""
    receipt = Receipt(repo.name, repo.commit, {file.name: (file.size_bytes, file.digest) for file in files})
    path = folder / (NAME + ".new")
    try:
        path.write_bytes(msgspec.json.encode(receipt))
        os.replace(path, folder / NAME)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
