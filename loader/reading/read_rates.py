"""Measures how fast plain and packed weight files are read from each drive of this machine. Each rate is measured once and kept in
the cache folder.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loader import cached_file
from loader.files.direct_io import open_direct
from loader.files.file_calls import is_local
from loader.files.packed import Frame
from loader.reading.staging import StagingRing
from loader.reading.unpack import Decoder
from loader.threads import Thread

log = logging.getLogger("loader")

NAME = "read-rates.json"
NUM_THREADS = 3  # the number of threads a load reads with
MEASURED_BYTES = 256 << 20
WAIT_S = 10.0  # for the measurement of another drive


class _Kept(msgspec.Struct):
    """The content of the file in the cache folder that keeps the read rates, in bytes per second; for packed files, bytes of
    decoded weights per second. The keys of read_bytes_per_s are device numbers of file systems, as "major:minor". The keys of
    packed_bytes_per_s are the same, followed by a space and the name of the decoder."""

    read_bytes_per_s: dict[str, float] = {}
    packed_bytes_per_s: dict[str, float] = {}


class ReadRates:
    """The read rates of this machine's drives, each measured when it is first needed. cache_dir: the folder in which the rates are
    kept; "": they are not kept, and are measured each time they are asked for."""

    def __init__(self, cache_dir: str) -> None:
        self._cache_dir = cache_dir
        self._lock = threading.Lock()  # each rate is measured once, and no two at the same time

    def read_bytes_per_s(self, fd: int, ring: StagingRing) -> float:
        """Returns how many bytes per second the drive that holds a file delivers. If the rate is not known, it is measured by
        reading from this file. fd: descriptor of the file. ring: the staging slots (buffers of host memory) that the reads use.
        Raises OSError if the file cannot be read."""
        return self._known("read_bytes_per_s", _drive(fd), lambda: _measured(fd, ring, lambda thread, num_bytes: num_bytes))

    def packed_bytes_per_s(self, fd: int, frame: Frame, decoder: Decoder, ring: StagingRing) -> float:
        """Returns how many bytes of weights per second a load gets from packed files on the drive that holds a file. If the rate is
        not known, it is measured by reading from this file and decoding at the same time, because on few cores that takes longer
        than either alone. fd: descriptor of a packed file. frame: any frame (piece that can be decoded alone) of the file whose
        bytes are packed. ring: the staging slots (buffers of host memory) that the reads use. Raises OSError if the file cannot be
        read, and ValueError if it ends before `frame`."""
        key = f"{_drive(fd)} {decoder.name}"
        return self._known("packed_bytes_per_s", key, lambda: _measured_packed(fd, frame, decoder, ring))

    def _known(self, what: str, key: str, measure: Callable[[], float]) -> float:
        if not self._lock.acquire(timeout=WAIT_S):
            raise OSError(errno.ETIMEDOUT, "another drive is still being measured, and may not answer")
        try:
            kept = self._read()
            rates: dict[str, float] = getattr(kept, what)
            if rates.get(key, 0) <= 0:
                rates[key] = measure()
                log.info("measured: %s of %s is %.2f GB/s", what.removesuffix("_bytes_per_s") + " rate", key, rates[key] / 1e9)
                self._write(kept)
            return rates[key]
        finally:
            self._lock.release()

    def _read(self) -> _Kept:
        try:
            return msgspec.json.decode((Path(self._cache_dir) / NAME).read_bytes(), type=_Kept) if self._cache_dir else _Kept()
        except FileNotFoundError:
            return _Kept()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("%s is of no use (%s): measuring again", Path(self._cache_dir) / NAME, error)
            return _Kept()

    def _write(self, kept: _Kept) -> None:
        if not self._cache_dir:
            return
        path = Path(self._cache_dir) / NAME
        try:
            cached_file.replace(path, msgspec.json.encode(kept))
        except OSError as error:
            log.warning("%s can't be kept (%s): it is measured again next time", path, error.strerror)


def _drive(fd: int) -> str:
    device = os.fstat(fd).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def _measured(fd: int, ring: StagingRing, weights_of: Callable[[int, int], int]) -> float:
    """Returns how many bytes per second NUM_THREADS threads together read from a file and process. They read the file's first
    MEASURED_BYTES, past the page cache if the file system allows that, through the staging slots (buffers of host memory) of `ring`
    or, if the file is not local, through buffers of their own.

    weights_of(thread, num_bytes): processes num_bytes bytes that the thread with the index `thread` has just read, and returns how
    many bytes to count for them, for example bytes of decoded weights. Raises OSError, MemoryError, or what weights_of raises."""
    if not is_local(fd):  # a read that does not return would keep a slot of the loads
        ring = StagingRing(NUM_THREADS, ring.slot_bytes)
    try:
        direct = open_direct(fd)
    except OSError:
        direct = os.dup(fd)
    try:
        offsets = iter(range(0, min(os.fstat(fd).st_size, MEASURED_BYTES), ring.slot_bytes))
        num_bytes = [0] * NUM_THREADS

        def read(thread: int) -> None:
            for offset in offsets:
                slot = ring.take()
                try:
                    num_bytes[thread] += weights_of(thread, os.preadv(direct, [slot], offset))
                finally:
                    ring.give_back(slot)

        seconds = _run(read)
        return max(1.0, sum(num_bytes) / seconds)
    finally:
        os.close(direct)


def _measured_packed(fd: int, frame: Frame, decoder: Decoder, ring: StagingRing) -> float:
    """Returns how many bytes of weights per second several threads read and decode. Whenever a thread has read as many bytes as the
    frame has, it decodes the frame once, whatever the bytes are that it has read. fd: descriptor of a packed file. frame: the frame
    (piece of the file) that all threads decode. ring: the staging slots (buffers of host memory) that the reads use. Raises
    ValueError if the file ends before `frame`."""
    held = bytearray(frame.end - frame.begin)
    if os.preadv(fd, [held], frame.begin) != len(held):
        raise ValueError("the file ends before its first frame")
    data = np.frombuffer(held, np.uint8)
    outs = [np.zeros(frame.num_bytes // 2, np.uint16) for _ in range(NUM_THREADS)]
    decoder.decode(data, outs[0])
    left = [0] * NUM_THREADS  # per thread: bytes read that are not yet a whole frame

    def decode(thread: int, num_bytes: int) -> int:
        count, left[thread] = divmod(left[thread] + num_bytes, len(held))
        for _ in range(count):
            decoder.sum_of(data)
            decoder.decode(data, outs[thread])
        return count * frame.num_bytes

    return _measured(fd, ring, decode)


def _run(work: Callable[[int], Any]) -> float:
    """Calls work(number) in each of NUM_THREADS threads, numbered from 0, and returns the seconds until all have ended. Raises the
    first exception that one of them raised, and MemoryError if there is no memory for a thread."""
    failed: list[Exception] = []

    def guarded(place: int) -> None:
        try:
            work(place)
        except Exception as error:
            failed.append(error)

    threads = [Thread(target=guarded, args=(place,), name=f"rates {place}") for place in range(NUM_THREADS)]
    started_s = time.perf_counter()
    with ExitStack() as stack:
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
    if failed:
        raise failed[0]
    return max(1e-9, time.perf_counter() - started_s)
