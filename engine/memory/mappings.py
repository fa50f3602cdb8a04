"""Maps and unmaps memory by system calls, for what Python's mmap cannot do: fixed addresses, ranges without access, huge pages on
demand.

Addresses and lengths are in bytes. Functions raise MemoryError if the system refuses, except those whose result says so. All
release the GIL.
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
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE


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
    """Reserves num_bytes bytes of address space without memory, aligned to a huge page, and returns their address. An access to the
    space before something is mapped there is a segmentation fault."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    begin = _map(None, num_bytes + HUGE_PAGE_BYTES, _PROT_NONE, flags, -1, 0, "reserve")
    address = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if address > begin:
        release(begin, address - begin)
    release(address + num_bytes, begin + HUGE_PAGE_BYTES - address)
    return address


def map_file(address: int, num_bytes: int, fd: int, offset_bytes: int) -> None:
    """Maps num_bytes bytes of a file, from offset_bytes on, at an address inside a reserved range, for reading and writing. Changes
    go to the file and are seen by all who map it."""
    _map(address, num_bytes, _PROT_READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, offset_bytes, "map")


def unmap(address: int, num_bytes: int) -> None:
    """Unmaps whatever is mapped in num_bytes bytes from `address` on, which are in a reserved range; the addresses stay
    reserved."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    _map(address, num_bytes, _PROT_NONE, flags, -1, 0, "unmap")


def release(address: int, num_bytes: int) -> None:
    """Returns a reserved address range to the system, and unmaps whatever is mapped there."""
    if num_bytes and _libc().munmap(address, num_bytes):
        raise MemoryError(f"can't release {num_bytes} bytes: {os.strerror(ctypes.get_errno())}")


def populate(address: int, num_bytes: int) -> bool:
    """Makes the system provide memory for every page of a mapped range; the pages' content is kept. Returns whether it did; False:
    the system refuses."""
    return not _libc().madvise(address, num_bytes, _MADV_POPULATE_WRITE)


def collapse(address: int, num_bytes: int) -> int:
    """Moves mapped memory with its content into huge pages, and returns how many bytes are in huge pages now. It works whatever the
    system's setting for huge pages is, but takes several milliseconds per huge page. At least one page in every 2 MiB must have
    been touched before. address, num_bytes: multiples of a huge page."""
    madvise = _libc().madvise
    places = range(address, address + num_bytes, HUGE_PAGE_BYTES)
    return sum(HUGE_PAGE_BYTES for place in places if not madvise(place, HUGE_PAGE_BYTES, _MADV_COLLAPSE))


def punch_hole(fd: int, offset_bytes: int, num_bytes: int) -> None:
    """Returns the memory of num_bytes bytes of a memfd, from offset_bytes on, to the system; these bytes read as zeros
    afterwards."""
    if _libc().fallocate(fd, _PUNCH_HOLE, offset_bytes, num_bytes):
        raise MemoryError(f"can't give back {num_bytes} bytes: {os.strerror(ctypes.get_errno())}")


def bytes_at(address: int, num_bytes: int) -> Any:
    """Returns the memory at an address as an object that supports the buffer protocol. The object does not keep the memory mapped,
    and must not be touched once the memory is unmapped."""
    return (ctypes.c_uint8 * num_bytes).from_address(address)
