"""Finds the files that contain the node's settings: the named file, and those in the folder `conf.d` beside it."""

from __future__ import annotations

import errno
import os
import stat

FOLDER = "conf.d"
SUFFIX = ".toml"


def folder_of(path: str) -> str:
    """Returns the folder `conf.d` that belongs to the settings file at `path`, whether or not it exists."""
    return os.path.join(os.path.dirname(path), FOLDER)


def settings_files(path: str) -> list[str]:
    """Returns the settings files in the order in which they are read; a later one overrides the earlier ones. `path` is the first.
    The visible files of conf.d whose names end in .toml follow, sorted by code points. Raises OSError with a file name if conf.d
    cannot be read, or if one of these files has an unprintable name or is not a regular file."""
    folder = folder_of(path)
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        if os.path.islink(folder):
            raise  # a link to nothing
        return [path]
    found = [path]
    for name in names:
        if name.startswith(".") or not name.endswith(SUFFIX):
            continue
        if not name.isprintable():  # such a name could not be shown in a log, or sent as UTF-8
            raise OSError(errno.EILSEQ, f"the name {name!a} is not printable UTF-8", folder)
        file = os.path.join(folder, name)
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", file)
        found.append(file)
    return found


def present_files(path: str) -> list[str]:
    """Returns the settings files, in the order in which they are read; only `path` itself if conf.d cannot be read. Never raises
    OSError."""
    try:
        return settings_files(path)
    except OSError:
        return [path]
