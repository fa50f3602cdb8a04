"""Finds the files that hold the node's settings: the one that is named, and those in the folder `conf.d` beside it."""

from __future__ import annotations

import errno
import os
import stat

FOLDER = "conf.d"
SUFFIX = ".toml"


def folder_of(path: str) -> str:
    """Returns the folder whose files add to the settings file at `path`, whether or not it exists."""
    return os.path.join(os.path.dirname(path), FOLDER)


def settings_files(path: str) -> list[str]:
    """Returns the files in the order in which they are read, so that the later ones win: `path`, then those of conf.d whose names
    end in .toml, by name (by code points). Hidden files and editors' backups are left out. Raises OSError, with the file's name,
    if the folder cannot be read or holds such a name that is no regular file, which reading could wait for."""
    folder = folder_of(path)
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        if os.path.islink(folder):
            raise  # it leads nowhere
        return [path]
    found = [path]
    for name in names:
        if name.startswith(".") or not name.endswith(SUFFIX):
            continue
        if not name.isprintable():  # it could not be shown in a log, nor be sent as UTF-8
            raise OSError(errno.EILSEQ, f"the name {name!a} is not printable UTF-8", folder)
        file = os.path.join(folder, name)
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", file)
        found.append(file)
    return found


def present_files(path: str) -> list[str]:
    """Returns what settings_files does, or the named file alone where that fails."""
    try:
        return settings_files(path)
    except OSError:
        return [path]
