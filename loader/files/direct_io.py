"""Opens files for direct reads, which bypass the page cache. Determines for which ranges direct reads are faster, and what
alignment the kernel requires of them.

A range that is mostly in the page cache is copied from there, at the speed of memory. Any other range is read with O_DIRECT
straight from the drive, which costs almost no CPU time and leaves the page cache to others. The module works on Linux only, and
makes system calls directly where libc has no wrapper.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass

_CACHESTAT = 451  # Linux 6.5; the same number on every architecture
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000  # Linux 6.1
_STATX_BYTES = 256
_DIOALIGN_OFFSET = 152  # where struct statx has stx_dio_mem_align; stx_dio_offset_align follows it
DEFAULT_ALIGN_BYTES = 4096  # used where the kernel doesn't say; a multiple of every block size in use
BLOCK_BYTES = 4096  # direct reads consist of whole blocks, in the file and in memory
PROBES = 4  # number of pages that are tested if cachestat is not available
# Error numbers with which a drive or file system refuses a direct read.
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True, frozen=True)
class Alignment:
    """The requirements of direct reads of a file: memory addresses must be multiples of memory_bytes, offsets and lengths in the
    file multiples of offset_bytes."""

    memory_bytes: int
    offset_bytes: int


def direct_alignment(fd: int) -> Alignment:
    """Returns the alignment that the kernel reports for the file, or DEFAULT_ALIGN_BYTES for both if it reports none."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        failed = _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer)
    except AttributeError:  # a libc without statx
        failed = -1
    (mask,) = struct.unpack_from("=I", buffer)
    memory_bytes, offset_bytes = struct.unpack_from("=II", buffer, _DIOALIGN_OFFSET)
    if failed or not mask & _STATX_DIOALIGN or not memory_bytes or not offset_bytes:
        return Alignment(DEFAULT_ALIGN_BYTES, DEFAULT_ALIGN_BYTES)
    return Alignment(memory_bytes, offset_bytes)


def open_direct(fd: int) -> int:
    """Returns another descriptor of an open file, for reads that bypass the page cache (O_DIRECT). It refers to the same file even
    if the file has been renamed or deleted. Raises OSError, also if the file system does not support direct reads."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)


def is_cached(fd: int, begin: int, end: int) -> bool:
    """Returns whether the page cache holds at least half of a file's bytes [begin, end). If it does, a buffered read is faster than
    a direct one."""
    pages = _cached_pages(fd, begin, end - begin)
    if pages is not None:
        return 2 * pages * os.sysconf("SC_PAGE_SIZE") >= end - begin
    # From the end, because a probe may have the kernel read on behind it, where the next one would find what it read.
    found = sum(_page_is_cached(fd, begin + (end - begin) * i // PROBES) for i in reversed(range(PROBES)))
    return 2 * found >= PROBES


def _cached_pages(fd: int, offset: int, length: int) -> int | None:
    """Returns how many pages of a range of a file the page cache holds; None if the kernel does not say, because it is too old or
    the file belongs to another user."""
    asked = struct.pack("=QQ", offset, length)
    answer = ctypes.create_string_buffer(40)
    if _libc.syscall(_CACHESTAT, fd, asked, answer, 0):
        return None
    return int(struct.unpack_from("=Q", answer)[0])


def _page_is_cached(fd: int, offset: int) -> bool:
    """Returns whether the page cache holds the page of a file at `offset` (bytes). The page is read with RWF_NOWAIT, which fails if
    it is not cached. (mincore would say that all pages of another user's file are cached.)"""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:
        return False
