"""Reads and writes the receipt of a model folder that `hearth pull` has downloaded: the file `.pull.json`, which has the
repository, the commit, and each file's size and digest. The catalog ignores it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from daemon.cli.pull.plan import Repo, RepoFile

NAME = ".pull.json"


class Receipt(msgspec.Struct, frozen=True):
    """A description of what `hearth pull` has downloaded into a folder. files: name -> (size in bytes, digest)."""

    repo: str
    commit: str
    files: dict[str, tuple[int, str]]

    def is_complete(self, folder: Path) -> bool:
        return all(self.has(folder, name) for name in self.files)

    def has(self, folder: Path, name: str) -> bool:
        """Returns whether `folder` has the file `name` with the size that the receipt (what was downloaded) says."""
        try:
            return (folder / name).stat().st_size == self.files[name][0]
        except OSError:
            return False


def read(folder: Path) -> Receipt | None:
    """Returns the receipt (the description of what was downloaded) in the folder; None if there is none or it cannot be read."""
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Receipt)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def write(folder: Path, repo: Repo, files: Iterable[RepoFile]) -> None:
    """Writes a receipt into the folder, which says that these files of the repository's commit were downloaded. Raises OSError if
    the file cannot be written."""
    receipt = Receipt(repo.name, repo.commit, {file.name: (file.size_bytes, file.digest) for file in files})
    path = folder / (NAME + ".new")
    try:
        path.write_bytes(msgspec.json.encode(receipt))
        os.replace(path, folder / NAME)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
