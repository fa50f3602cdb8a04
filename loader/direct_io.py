"""Files read past the page cache where that is faster: what the kernel says of a file, asked once or per read.

A range that the page cache holds is read from there (a copy at memory speed); one it does not hold is read with O_DIRECT straight
from the drive, which costs almost no CPU and leaves the cache to others. Linux only, by system call where libc has no wrapper.
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
_DIOALIGN_OFFSET = 152  # of stx_dio_mem_align in struct statx; stx_dio_offset_align follows
DEFAULT_ALIGN_BYTES = 4096  # where the kernel doesn't say; a multiple of every block size in use
BLOCK_BYTES = 4096  # direct reads are in whole ones, of the file as of memory
PROBES = 4  # pages asked for where cachestat is not to be had
# What a drive or file system answers to a read it can't do directly.
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True, frozen=True)
class Alignment:
    """What direct reads of a file ask of memory addresses, and of offsets and lengths in the file."""

    memory_bytes: int
    offset_bytes: int


def direct_alignment(fd: int) -> Alignment:
    """As the kernel says, else DEFAULT_ALIGN_BYTES for both."""
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
    """Another descriptor of the same file (whatever its name leads to by now) for reads past the page cache. Raises OSError."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)


def is_cached(fd: int, begin: int, end: int) -> bool:
    """Whether the page cache holds at least half of bytes [begin, end): from there on a buffered read is the faster one."""
    pages = _cached_pages(fd, begin, end - begin)
    if pages is not None:
        return 2 * pages * os.sysconf("SC_PAGE_SIZE") >= end - begin
    found = sum(_page_is_cached(fd, begin + (end - begin) * i // PROBES) for i in range(PROBES))
    return 2 * found >= PROBES


def _cached_pages(fd: int, offset: int, length: int) -> int | None:
    """None: not told, by an older kernel or because the file is another user's."""
    asked = struct.pack("=QQ", offset, length)
    answer = ctypes.create_string_buffer(40)
    if _libc.syscall(_CACHESTAT, fd, asked, answer, 0):
        return None
    return int(struct.unpack_from("=Q", answer)[0])


def _page_is_cached(fd: int, offset: int) -> bool:
    """By a read that must not wait. mincore is no help here: of another user's file it says that everything is cached."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:
        return False
