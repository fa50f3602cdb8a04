"""Address space by system call: what Python's mmap cannot do (fixed places, ranges without access, huge pages on demand).

Addresses and lengths are bytes. Every call raises MemoryError when the system refuses. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from typing import Any

HUGE_PAGE_BYTES = 2 << 20

# Linux's values; Python's mmap has no names for them.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
_FAILED = ctypes.c_void_p(-1).value
_PUNCH_HOLE = 0x02 | 0x01  # and the file keeps its size


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size, address = ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, ctypes.c_int]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def _map(address: int | None, num_bytes: int, protection: int, flags: int, fd: int, offset_bytes: int, what: str) -> int:
    mapped = _libc().mmap(address, num_bytes, protection, flags, fd, offset_bytes)
    if mapped == _FAILED:
        raise MemoryError(f"can't {what} {num_bytes} bytes: {os.strerror(ctypes.get_errno())}")
    return int(mapped)


def reserve(num_bytes: int) -> int:
    """Address space without memory, on a huge page's boundary: touching it is a segmentation fault."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    begin = _map(None, num_bytes + HUGE_PAGE_BYTES, _PROT_NONE, flags, -1, 0, "reserve")
    address = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if address > begin:
        release(begin, address - begin)
    release(address + num_bytes, begin + HUGE_PAGE_BYTES - address)
    return address


def map_file(address: int, num_bytes: int, fd: int, offset_bytes: int) -> None:
    """Part of a file, shared, at a place inside a reservation."""
    _map(address, num_bytes, _PROT_READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, offset_bytes, "map")


def unmap(address: int, num_bytes: int) -> None:
    """The place is a reservation again."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    _map(address, num_bytes, _PROT_NONE, flags, -1, 0, "unmap")


def release(address: int, num_bytes: int) -> None:
    """Ends a reservation, whatever is mapped there."""
    if num_bytes and _libc().munmap(address, num_bytes):
        raise MemoryError(f"can't release {num_bytes} bytes: {os.strerror(ctypes.get_errno())}")


def populate(address: int, num_bytes: int) -> bool:
    """Gives every page of a mapping memory; contents stay. False where the system can't."""
    return not _libc().madvise(address, num_bytes, _MADV_POPULATE_WRITE)


def collapse(address: int, num_bytes: int) -> int:
    """Puts mapped memory, touched once in every 2 MiB at least, into huge pages, contents and all; returns how many bytes are in
    them now. It needs no setting of the system, and several milliseconds for each. num_bytes: whole huge pages."""
    madvise = _libc().madvise
    places = range(address, address + num_bytes, HUGE_PAGE_BYTES)
    return sum(HUGE_PAGE_BYTES for place in places if not madvise(place, HUGE_PAGE_BYTES, _MADV_COLLAPSE))


def punch_hole(fd: int, offset_bytes: int, num_bytes: int) -> None:
    """Gives part of a memfd back to the system; it reads as zeros afterwards."""
    if _libc().fallocate(fd, _PUNCH_HOLE, offset_bytes, num_bytes):
        raise MemoryError(f"can't give back {num_bytes} bytes: {os.strerror(ctypes.get_errno())}")


def bytes_at(address: int, num_bytes: int) -> Any:
    """The memory there, as something that has a buffer. It holds nothing: it must not be touched once it is unmapped."""
    return (ctypes.c_uint8 * num_bytes).from_address(address)
