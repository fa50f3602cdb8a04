"""Opens files whose origin is not known. Refuses pipes, sockets and devices, because opening one could wait forever."""

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
    """Opens a regular file for reading and returns its descriptor. Raises OSError if it cannot be opened; if `path` is not a
    regular file, the message says what it is."""
    _check(os.stat(path).st_mode, path)  # before opening it: some devices act when they are opened
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(os.fstat(fd).st_mode, path)  # the path may name another file by now
    except OSError:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Returns the content of a regular file. Raises OSError if it cannot be read, is no regular file, or is longer than
    most_bytes."""
    with open(open_regular(path), "rb") as file:
        is_longer = os.fstat(file.fileno()).st_size > most_bytes
        data = b"" if is_longer else file.read(most_bytes + 1)  # one more, since the file may have grown meanwhile
    if data is None:  # /proc/kmsg calls itself a regular file, too
        raise OSError(errno.EAGAIN, "has nothing to read at the moment", os.fspath(path))
    if is_longer or len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"is longer than {most_bytes} bytes", os.fspath(path))
    return data


def _check(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a regular file", os.fspath(path))
