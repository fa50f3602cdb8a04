"""Records that outlive the process that writes them, in a memfd of the FD store. Each can be added, extended and removed without
moving the others."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import struct
import weakref
import zlib
from collections.abc import Iterator

from daemon.process.account import write_at
from daemon.process.fd_store import FdStore
from engine.memory.mappings import punch_hole

PAGE = 4096
_FORM = b"records1"  # the file's first bytes; a version of hearthd with another record format drops the file
_KEY_BYTES = 16  # random bytes after _FORM and at the start of each record, so that no content can look like a record
_FIELDS = struct.Struct("<QQI")  # bytes of content, bytes of room, CRC-32 of the content
_SUM = struct.Struct("<I")  # CRC-32 of the fields
_HEAD_BYTES = _KEY_BYTES + _FIELDS.size + _SUM.size


class KeptRecords:
    """Records of bytes in a sparse file. A record is identified by its place, which is its offset in the file. It begins on a page
    of its own, and may be followed by room for bytes that are written later; pages of that room take memory only once they are
    written.

    Offsets are never reused, because a file has more of them than will ever be needed; the pages of a removed record are returned
    to the system. A record is valid once its head is written, which is done last, so the process may be killed at any time."""

    def __init__(self, fd: int | None = None) -> None:
        """fd: a file that an earlier process wrote, owned by this object from now on. None: a memfd is made when it is needed."""
        self._fd = -1
        self._key = b""
        self._sizes: dict[int, tuple[int, int]] = {}  # place -> (bytes of content, bytes of room)
        self._end = PAGE
        if fd is not None:
            self._own(fd)
            begin = os.pread(fd, len(_FORM) + _KEY_BYTES, 0)
            if begin.startswith(_FORM) and len(begin) == len(_FORM) + _KEY_BYTES:
                self._key = begin[len(_FORM) :]
                self._find()
            else:  # another version wrote it, or its writer was killed while it made the file
                os.ftruncate(fd, 0)
                self._begin()

    @classmethod
    def of(cls, store: FdStore | None, name: str) -> KeptRecords:
        """Returns the records that an earlier process left in the FD store under this name; if there are none, empty ones, which
        are stored. store: the FD store; None: the records end with this process. Raises OSError."""
        if store is None:
            return cls()
        fd = store.take(name)
        if fd is not None:
            return cls(fd)
        made = cls()
        if store.usable:
            made._make(name)
            store.put(name, made._fd)
        return made

    def __iter__(self) -> Iterator[int]:
        """Yields the place (offset) of each record, in the order in which the records were added."""
        return iter(list(self._sizes))

    def add(self, content: bytes, room_bytes: int = 0) -> int:
        """Adds a record with this content and returns its place. room_bytes: the size of the room for bytes that are written later.
        Raises OSError if there is no memory for the content."""
        if self._fd < 0:
            self._make("records")
        place, fields = self._end, _FIELDS.pack(len(content), room_bytes, zlib.crc32(content))
        try:
            write_at(self._fd, content, place + _HEAD_BYTES)
            write_at(self._fd, self._key + fields + _SUM.pack(zlib.crc32(fields)), place)
        except OSError:
            self._release(place, _HEAD_BYTES + len(content))
            raise
        self._sizes[place] = len(content), room_bytes
        self._end = paged(place + _HEAD_BYTES + len(content) + room_bytes)
        return place

    def read(self, place: int) -> bytes:
        """Returns the content with which the record at `place` was added, without the bytes that were written later to the room
        behind it."""
        return os.pread(self._fd, self._sizes[place][0], place + _HEAD_BYTES)

    def write_room(self, place: int, at: int, data: bytes) -> None:
        """Writes `data` to the room of the record at `place`, from the room's byte `at` on; it must fit there. Raises OSError if
        there is no memory for it."""
        num_bytes, room_bytes = self._sizes[place]
        assert at + len(data) <= room_bytes, (at, len(data), room_bytes)
        write_at(self._fd, data, place + _HEAD_BYTES + num_bytes + at)

    def read_room(self, place: int) -> bytes:
        """Returns the bytes that were written later to the room behind the record at `place`. Bytes that were never written are
        zeros, or missing at the end."""
        num_bytes, room_bytes = self._sizes[place]
        return os.pread(self._fd, room_bytes, place + _HEAD_BYTES + num_bytes)

    def remove(self, place: int) -> None:
        num_bytes, room_bytes = self._sizes.pop(place)
        with contextlib.suppress(OSError):  # the page exists already, so this fails only if the system has no memory at all
            write_at(self._fd, bytes(_HEAD_BYTES), place)
        self._release(place, _HEAD_BYTES + num_bytes + room_bytes)

    def _make(self, name: str) -> None:
        self._own(os.memfd_create(name, os.MFD_CLOEXEC))
        self._begin()

    def _own(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    def _begin(self) -> None:
        self._key = secrets.token_bytes(_KEY_BYTES)
        write_at(self._fd, _FORM + self._key, 0)

    def _find(self) -> None:
        """Finds the valid records in a file that an earlier process wrote, so that they can be read by their places. Frees the
        pages of incomplete records, which the process was adding or removing when it was killed."""
        place = PAGE
        while (data := self._next_data(place)) is not None:
            place = max(place, data // PAGE * PAGE)
            head = os.pread(self._fd, _HEAD_BYTES, place)
            fields = head[_KEY_BYTES : _KEY_BYTES + _FIELDS.size]
            if head.startswith(self._key) and head.endswith(_SUM.pack(zlib.crc32(fields))):
                num_bytes, room_bytes, crc = _FIELDS.unpack(fields)
                if zlib.crc32(os.pread(self._fd, num_bytes, place + _HEAD_BYTES)) == crc:
                    self._sizes[place] = num_bytes, room_bytes
                    place = paged(place + _HEAD_BYTES + num_bytes + room_bytes)
                    continue
            self._release(place, PAGE)
            place += PAGE
        self._end = max(place, paged(os.fstat(self._fd).st_size))

    def _next_data(self, place: int) -> int | None:
        """Returns the first offset, `place` or greater, at which the file has a page in memory; None if there is no such page."""
        try:
            return os.lseek(self._fd, place, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise

    def _release(self, place: int, num_bytes: int) -> None:
        with contextlib.suppress(MemoryError):  # the pages stay allocated, which does no other harm
            punch_hole(self._fd, place, paged(num_bytes))


def memory_of(content_bytes: int) -> int:
    """Returns the bytes of memory that a record with this much content takes, without its room: whole pages, head included."""
    return paged(_HEAD_BYTES + content_bytes)


def paged(num_bytes: int) -> int:
    """Returns num_bytes, rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE
