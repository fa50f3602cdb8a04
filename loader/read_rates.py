"""How fast this machine reads a drive and decodes packed weights: measured once, kept in the cache folder."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loader.direct_io import open_direct
from loader.packed import Frame
from loader.staging import StagingRing
from loader.unpack import Decoder

log = logging.getLogger("loader")

NAME = "read-rates.json"
NUM_THREADS = 3  # as loads read
MEASURED_BYTES = 256 << 20
DECODING_S = 0.03


class _Kept(msgspec.Struct):
    """bytes_per_s: of reads past the page cache, by the device number of the file system; of weights that come out of a decoder, by
    what it is."""

    read_bytes_per_s: dict[str, float] = {}
    decoded_bytes_per_s: dict[str, float] = {}


class ReadRates:
    """cache_dir: "" keeps nothing."""

    def __init__(self, cache_dir: str) -> None:
        self._cache_dir = cache_dir
        self._lock = threading.Lock()  # measured once, and by itself

    def read_bytes_per_s(self, fd: int, ring: StagingRing) -> float:
        """Of the drive with this file, which is read if it was not measured before. Raises OSError."""
        device = os.fstat(fd).st_dev
        drive = f"{os.major(device)}:{os.minor(device)}"
        return self._known("read_bytes_per_s", drive, lambda: _measured_read(fd, ring))

    def decoded_bytes_per_s(self, fd: int, frame: Frame, decoder: Decoder) -> float:
        """Bytes of weights, by as many threads as a load has. frame: any packed one of the file. Raises OSError, ValueError."""
        return self._known("decoded_bytes_per_s", decoder.name, lambda: _measured_decode(fd, frame, decoder))

    def _known(self, what: str, key: str, measure: Callable[[], float]) -> float:
        with self._lock:
            kept = self._read()
            rates: dict[str, float] = getattr(kept, what)
            if rates.get(key, 0) <= 0:
                rates[key] = measure()
                log.info("measured: %s of %s is %.2f GB/s", what.replace("_bytes_per_s", " rate"), key, rates[key] / 1e9)
                self._write(kept)
            return rates[key]

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
        partial = path.with_name(f".{NAME}.{os.getpid()}")
        try:
            partial.write_bytes(msgspec.json.encode(kept))
            os.replace(partial, path)
        except OSError as error:
            log.warning("%s can't be kept (%s): it is measured again next time", path, error.strerror)


def _measured_read(fd: int, ring: StagingRing) -> float:
    """Past the page cache where the file system allows that."""
    try:
        direct = open_direct(fd)
    except OSError:
        direct = os.dup(fd)
    try:
        end = min(os.fstat(fd).st_size, MEASURED_BYTES)
        offsets = iter(range(0, end, ring.slot_bytes))
        num_bytes = [0] * NUM_THREADS

        def read(place: int) -> None:
            for offset in offsets:
                slot = ring.take()
                try:
                    num_bytes[place] += os.preadv(direct, [slot], offset)
                finally:
                    ring.give_back(slot)

        seconds = _run(read)
        return max(1.0, sum(num_bytes) / seconds)
    finally:
        os.close(direct)


def _measured_decode(fd: int, frame: Frame, decoder: Decoder) -> float:
    held = bytearray(frame.end - frame.begin)
    if os.preadv(fd, [held], frame.begin) != len(held):
        raise ValueError("the file ends before its first frame")
    data = np.frombuffer(held, np.uint8)
    outs = [np.empty(frame.num_bytes // 2, np.uint16) for _ in range(NUM_THREADS)]
    counts = [0] * NUM_THREADS
    decoder.decode(data, outs[0])
    until_s = time.perf_counter() + DECODING_S

    def decode(place: int) -> None:
        while not counts[place] or time.perf_counter() < until_s:
            decoder.sum_of(data)
            decoder.decode(data, outs[place])
            counts[place] += 1

    seconds = _run(decode)
    return sum(counts) * frame.num_bytes / seconds


def _run(work: Callable[[int], Any]) -> float:
    """Seconds that the threads take. Raises what one of them raised."""
    failed: list[Exception] = []

    def guarded(place: int) -> None:
        try:
            work(place)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(place,), name=f"rates {place}") for place in range(NUM_THREADS)]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return max(1e-9, time.perf_counter() - started_s)
