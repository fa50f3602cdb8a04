"""Measures how two ranks of a split model may read the same matrices, of which each needs half of every row.

Each rank is a process of its own that reads 512 MiB of a file, both at the same time, in turn with the others' ways. The files are
dropped from the page cache before. `python -m benchmarks.column_reads [--checkpoint DIR] [--rounds N]` prints one JSON line for
each way and length of a rank's part of a row:

whole rows: direct reads of 16 MiB, three at once, as loads do; so the drive gives everything to each rank.
page cache: the same through the page cache, with readahead asked for; what was read is dropped from the cache 128 MiB later.
uncached: the same with RWF_DONTCACHE (Linux 6.14), where the kernel drops what has been read.
own parts: direct reads of the rank's half of each row alone, by io_submit, two threads with 64 or 128 reads at once each.

drive: what the drive gave, by /proc/PID/io, as a part of the 512 MiB. ratio: the time until both have all, as a part of that of
whole rows in the same round; its median, least and most.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.loading import MIB, STORE, _all_at_once, make_checkpoint, memory, set_cache, weight_files
from benchmarks.loading_shares import at_once, when_told
from loader.reading.staging import SLOT_BYTES
from loader.reading.weight_stream import NUM_READERS

TOTAL_BYTES, SECTOR_BYTES = 512 * MIB, 512
BEHIND_SLOTS = 8
RWF_DONTCACHE = 0x80
NUM_RANKS, NUM_SUBMITTERS = 2, 2
# io_setup, io_destroy, io_submit, io_getevents
CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}[platform.machine()]
WHOLE = "whole rows"

_libc = ctypes.CDLL(None, use_errno=True)


def whole_rows(path: Path, way: str) -> Callable[[], None]:
    """Prepares reads of whole rows, and returns a function that carries them out."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if way == WHOLE else 0))
    left, done = iter(range(0, TOTAL_BYTES, SLOT_BYTES)), list[int]()
    slots = iter([memory(SLOT_BYTES, huge=True, prepared=True) for _ in range(NUM_READERS)])

    def read() -> None:
        slot = next(slots)
        for at in left:
            if way != WHOLE:
                os.posix_fadvise(fd, at, SLOT_BYTES, os.POSIX_FADV_WILLNEED)
            os.preadv(fd, [slot], at, RWF_DONTCACHE if way == "uncached" else 0)
            done.append(at)
            if way == "page cache" and len(done) > BEHIND_SLOTS:
                os.posix_fadvise(fd, done[-1 - BEHIND_SLOTS], SLOT_BYTES, os.POSIX_FADV_DONTNEED)

    def all_rows() -> None:
        _all_at_once(read, NUM_READERS)
        if way == "page cache":
            os.posix_fadvise(fd, 0, TOTAL_BYTES, os.POSIX_FADV_DONTNEED)

    return all_rows


def own_parts(path: Path, run_bytes: int, num_at_once: int) -> Callable[[], None]:
    """Prepares reads of the first half of each 2 * run_bytes, and returns a function that carries them out. Each read is a sector
    longer, because a part seldom begins where a sector does."""
    fd, left = os.open(path, os.O_RDONLY | os.O_DIRECT), iter(range(0, TOTAL_BYTES, SLOT_BYTES))
    slots = iter([memory(2 * SLOT_BYTES, huge=True, prepared=True) for _ in range(NUM_SUBMITTERS)])
    return lambda: _all_at_once(lambda: _submit(fd, left, next(slots), run_bytes, num_at_once), NUM_SUBMITTERS)


def _submit(fd: int, left: Iterator[int], slot: memoryview, run_bytes: int, num_at_once: int) -> None:
    setup, destroy, submit, get_events = CALLS
    context = ctypes.c_ulong(0)
    if _libc.syscall(setup, num_at_once, ctypes.byref(context)):
        raise OSError(ctypes.get_errno(), "io_setup")
    num_runs, length = SLOT_BYTES // (2 * run_bytes), run_bytes + SECTOR_BYTES
    number = np.arange(num_runs, dtype=np.uint64)
    blocks = np.zeros((num_runs, 8), np.uint64)  # struct iocb
    blocks[:, 2] = np.uint64(fd) << np.uint64(32)  # IOCB_CMD_PREAD
    blocks[:, 3] = np.frombuffer(slot, np.uint8).ctypes.data + number * np.uint64(length)
    blocks[:, 4] = length
    pointers = (blocks.ctypes.data + number * np.uint64(64)).astype(np.uint64)
    events = np.zeros((num_at_once, 4), np.uint64)
    for begin in left:
        blocks[:, 5] = begin + number * np.uint64(2 * run_bytes)
        next_run, under_way = 0, 0
        while next_run < num_runs or under_way:
            count = min(num_at_once - under_way, num_runs - next_run)
            if count:
                count = _libc.syscall(submit, context, ctypes.c_long(count), ctypes.c_void_p(pointers.ctypes.data + 8 * next_run))
                if count < 0:
                    raise OSError(ctypes.get_errno(), "io_submit")
                next_run, under_way = next_run + count, under_way + count
            least = ctypes.c_long(min(under_way, num_at_once // 2))
            count = _libc.syscall(
                get_events, context, least, ctypes.c_long(num_at_once), ctypes.c_void_p(events.ctypes.data), ctypes.c_void_p(0)
            )
            if count < 0 or not (events[:count, 2] == length).all():
                raise OSError(ctypes.get_errno(), "a read failed or was short")
            under_way -= count
    _libc.syscall(destroy, context)


def ways() -> dict[str, Callable[[Path], Callable[[], None]]]:
    """Returns for each way a function that prepares it for a file (whole_rows, own_parts)."""
    found: dict[str, Callable[[Path], Callable[[], None]]] = {
        way: partial(whole_rows, way=way) for way in (WHOLE, "page cache", "uncached")
    }
    for kib, num_at_once in ((2, 128), (8, 128), (32, 64), (64, 64)):
        found[f"own parts of {kib} KiB"] = partial(own_parts, run_bytes=kib << 10, num_at_once=num_at_once)
    return found


def together(folder: Path, way: str) -> tuple[float, float, float]:
    """Returns the seconds until all ranks have read, and the sums of their CPU seconds and of the drive's bytes."""
    set_cache(weight_files(folder), warm=False)
    command = [sys.executable, "-m", "benchmarks.column_reads", "--checkpoint", str(folder), "--child", way]
    found = at_once([command] * NUM_RANKS)
    seconds = max(one["end_s"] for one in found) - min(one["begin_s"] for one in found)
    return seconds, sum(one["cpu_s"] for one in found), sum(one["drive_bytes"] for one in found) / TOTAL_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.column_reads", description=__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, help="a folder with a weight file of 512 MiB; default: that of benchmarks.loading"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.checkpoint or make_checkpoint(STORE / "loading")
    if options.child:
        when_told(ways()[options.child](weight_files(folder)[0]))
        return
    runs: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways()}
    for number in range(options.rounds):
        order = list(runs)
        random.Random(number).shuffle(order)
        for way in order:
            runs[way].append(together(folder, way))
            print(f"{number} {way}: {runs[way][-1]}", file=sys.stderr, flush=True)
    for way, own in runs.items():
        ratios = sorted(one[0] / other[0] for one, other in zip(own, runs[WHOLE], strict=True))
        line = {"benchmark": "column reads", "read as": way, "ranks": NUM_RANKS, "rounds": len(own)}
        line |= {"drive": round(statistics.median(one[2] for one in own), 3), "ratio": round(statistics.median(ratios), 2)}
        line |= {"from": round(ratios[0], 2), "to": round(ratios[-1], 2)}
        line |= {"seconds": round(statistics.median(one[0] for one in own), 3)}
        print(json.dumps(line | {"cpu s": round(statistics.median(one[1] for one in own), 3)}))


if __name__ == "__main__":
    main()
