"""Stores bytes that outlive the process: the next process reads the last version that was written completely, even if the writer
was killed in the middle of a write."""

from __future__ import annotations

import os
import struct
import zlib

_ENTRY = struct.Struct("<QQQII")  # version, offset, bytes, CRC-32 of the bytes, CRC-32 of the fields before it
_FIELDS = struct.Struct("<QQQI")
_BEGIN = 2 * _ENTRY.size  # offset at which the contents begin


class Account:
    """A memfd that holds the last two versions of some bytes, and a header with an entry for each version. A write replaces the
    older version and then its header entry, so one version is valid at any time, even if the writer is killed. fd: the memfd, owned
    by the account."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._last = max(filter(None, (self._entry(at) for at in (0, 1))), default=None)

    @classmethod
    def make(cls, name: str) -> Account:
        """Returns a new, empty account. name: the memfd's name in /proc. Raises OSError if the system has no descriptor left for
        it."""
        return cls(os.memfd_create(name, os.MFD_CLOEXEC))

    def write(self, data: bytes) -> None:
        """Replaces the content by `data`. Raises OSError if there is no memory for it; the old content stays then."""
        version, begin, num_bytes = self._last or (0, _BEGIN, 0)
        # before the valid version if there is room, else behind it: the file stays below three times the longest content
        offset = _BEGIN if _BEGIN + len(data) <= begin else begin + num_bytes
        write_at(self.fd, data, offset)
        fields = (version + 1, offset, len(data), zlib.crc32(data))
        write_at(self.fd, _ENTRY.pack(*fields, zlib.crc32(_FIELDS.pack(*fields))), (version + 1) % 2 * _ENTRY.size)
        self._last = (version + 1, offset, len(data))

    def read(self) -> bytes:
        """Returns the bytes that were written last; b"" if nothing was ever written. Raises OSError."""
        return b"" if self._last is None else os.pread(self.fd, self._last[2], self._last[1])

    def close(self) -> None:
        os.close(self.fd)

    def _entry(self, at: int) -> tuple[int, int, int] | None:
        """Returns the header entry with the index `at` (0 or 1), which describes one of the two versions: (version, offset, length
        in bytes). None if it is not valid, because it was never written or its write was interrupted."""
        packed = os.pread(self.fd, _ENTRY.size, at * _ENTRY.size)
        if len(packed) < _ENTRY.size:
            return None
        version, offset, num_bytes, sum_of_data, sum_of_fields = _ENTRY.unpack(packed)
        if not version or zlib.crc32(packed[: _FIELDS.size]) != sum_of_fields:
            return None
        if zlib.crc32(os.pread(self.fd, num_bytes, offset)) != sum_of_data:
            return None
        return version, offset, num_bytes


def write_at(fd: int, data: bytes, offset: int) -> None:
    """Writes all of `data` to a file, from byte `offset` on. Raises OSError if the file cannot be written."""
    left = memoryview(data)
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written
