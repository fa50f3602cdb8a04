from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loader.files import direct_io
from loader.files.direct_io import direct_alignment, is_cached, open_direct
from loader.reading.staging import HUGE_PAGE_BYTES, StagingRing

SIZE = 1 << 20


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    yield fd
    os.close(fd)


def forget(fd: int) -> None:
    """Drops the file from the page cache, or skips where it lives there."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if direct_io._cached_pages(fd, 0, SIZE):
        pytest.skip("the temporary folder's file system does not let go of cached pages (tmpfs)")


@pytest.mark.parametrize("cachestat", [True, False])
def test_the_page_cache_is_asked(fd: int, monkeypatch: pytest.MonkeyPatch, cachestat: bool) -> None:
    forget(fd)
    if not cachestat:  # an older kernel, or another user's file
        monkeypatch.setattr(direct_io, "_cached_pages", lambda *_: None)
    assert not is_cached(fd, 0, SIZE)
    os.pread(fd, SIZE, 0)
    assert is_cached(fd, 0, SIZE)
    assert is_cached(fd, 8192, 8192 + 100)


def test_half_a_range_in_the_cache_is_enough(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
    forget(fd)
    os.pread(fd, SIZE // 2 - 65536, 0)
    assert not is_cached(fd, 0, SIZE)
    os.pread(fd, SIZE // 2 + 65536, 0)
    assert is_cached(fd, 0, SIZE)


def test_a_direct_descriptor_is_the_same_file(fd: int, tmp_path: Path) -> None:
    wanted = os.pread(fd, 4096, 4096)
    os.replace(tmp_path / "file", tmp_path / "moved")
    (tmp_path / "file").write_bytes(b"another")
    try:
        direct = open_direct(fd)
    except OSError as error:
        pytest.skip(f"the temporary folder's file system refuses direct reads: {error.strerror}")
    buffer = mmap.mmap(-1, 4096)
    assert os.preadv(direct, [buffer], 4096) == 4096
    assert buffer[:] == wanted
    assert os.fstat(direct).st_ino == os.fstat(fd).st_ino
    os.close(direct)


def test_alignment_is_a_power_of_two(fd: int) -> None:
    alignment = direct_alignment(fd)
    for value in (alignment.memory_bytes, alignment.offset_bytes):
        assert value > 0
        assert value & value - 1 == 0
    reader, writer = os.pipe()
    assert direct_alignment(reader) == direct_io.Alignment(4096, 4096)  # not told
    os.close(reader)
    os.close(writer)


def test_slots_are_apart_and_come_back() -> None:
    ring = StagingRing(2, 8192)
    first, second = ring.take(), ring.take()
    first[:], second[:] = b"a" * 8192, b"b" * 8192
    assert bytes(first) == b"a" * 8192
    ring.give_back(first)
    third = ring.take()
    assert bytes(third) == b"a" * 8192
    addresses = sorted(np.frombuffer(slot, np.uint8).ctypes.data for slot in (second, third))
    assert addresses[0] % HUGE_PAGE_BYTES == 0
    assert addresses[1] - addresses[0] == 8192
