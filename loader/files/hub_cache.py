"""Finds models in the folders of a Hugging Face cache, as the hub's tools lay them out: `models--org--name/snapshots/COMMIT/`, with
links into `blobs/`.
"""

from __future__ import annotations

from pathlib import Path

from loader.files.regular_file import read_regular

PREFIX = "models--"
FOLDERS = ("refs", "snapshots")  # folders of a repository whose content says which snapshot is the model
MAX_REF_BYTES = 1024


def repo_name(folder_name: str) -> str | None:
    """Returns the name of the model in a folder of a Hugging Face cache: `org/name` for `models--org--name`, `name` for
    `models--name`. None for any other folder."""
    if not folder_name.startswith(PREFIX):
        return None
    parts = folder_name.removeprefix(PREFIX).split("--")
    return "/".join(parts) if len(parts) <= 2 and all(parts) else None


def snapshot(folder: Path) -> Path | None:
    """Returns the folder of the snapshot that counts as the model of a cached repository: that of the commit in `refs/main` or, if
    there is no such snapshot, the one that was written last. None if the repository has no snapshot. folder: the repository's
    folder `models--org--name`. Raises OSError if it cannot be read."""
    snapshots = folder / "snapshots"
    try:
        commit = read_regular(folder / "refs" / "main", MAX_REF_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    if commit and "/" not in commit and commit not in (".", "..") and (snapshots / commit).is_dir():
        return snapshots / commit
    try:
        found = [each for each in snapshots.iterdir() if not each.name.startswith(".") and each.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return max(found, key=lambda each: (each.stat().st_mtime_ns, each.name), default=None)
