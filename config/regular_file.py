"""Opening files that somebody else put there: a pipe, a socket or a device is refused, where opening it would wait or never end."""

from __future__ import annotations

import errno
import os
import stat

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor for reading. Raises OSError; one that says what `path` is where that is no regular file."""
    _check(os.stat(path).st_mode, path)  # before it is opened, which some devices act on
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(os.fstat(fd).st_mode, path)  # what was opened may be another one
    except OSError:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The file's content. Raises OSError as open_regular does, and where it is longer than most_bytes."""
    with open(open_regular(path), "rb") as file:
        is_longer = os.fstat(file.fileno()).st_size > most_bytes
        data = b"" if is_longer else file.read(most_bytes + 1)  # it may have grown meanwhile
    if is_longer or len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"is longer than {most_bytes} bytes", os.fspath(path))
    return data


def _check(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a regular file", os.fspath(path))
