"""Copies between a device and the host, concurrent with the steps of other models. Where the host does the copying, a few threads
copy and hold no lock meanwhile. Where the device copies by itself, several copies are under way at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from engine.memory.chunk_memory import ChunkMemory, CopiesSeveral, DeviceCopy, EndedCopy
from engine.memory.chunk_memory import Piece as Piece

NUM_THREADS = 2  # more gain nothing on the machines measured: one or two use all that a memory channel gives
# Copies of one thread: the device has the next one when one ends, and a cancellation waits for no more than these.
UNDER_WAY = 4

# What a thread copies in one call. Between two calls it needs the interpreter, which another thread may hold: 1 GB in pieces of
# 512 KiB took 170 ms of two cores with one piece per call, and 101 ms this way (a Xeon).
AT_ONCE_BYTES = 8 << 20


class TransferCancelled(Exception):
    """Raised when `cancelled()` became true during a transfer."""


def copies_several(memory: ChunkMemory, out: bool) -> Callable[[Sequence[Piece]], list[int]] | None:
    """Returns what `transfer` takes as `several`; None if the device does the copying."""
    return partial(memory.copy_several, out=out) if isinstance(memory, CopiesSeveral) else None


def transfer(
    copy: Callable[[int, Any], DeviceCopy],
    pieces: Sequence[Piece],
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda num_bytes: None,
    landed: Callable[[Piece], None] = lambda piece: None,
    next_piece: Callable[[], int | None] | None = None,
    several: Callable[[Sequence[Piece]], list[int]] | None = None,
) -> list[int]:
    """Copies every piece by `copy` (ChunkMemory.copy_in or copy_out) and returns their checksums. progress: called with the bytes
    done so far. landed: called with each piece that was copied, in any thread. next_piece: returns the index of a piece to copy,
    after waiting for one if it must, or None once for each of NUM_THREADS threads; default: all pieces in order. several: copies
    several pieces in place of `copy` and returns their checksums (copies_several).

    Raises the first error of a copy, or TransferCancelled; no copy is under way then."""
    checksums = [0] * len(pieces)
    errors: list[BaseException] = []
    next_piece = next_piece or partial(next, iter(range(len(pieces))), None)
    lock = threading.Lock()
    num_bytes = 0

    def finish(at: int, started: DeviceCopy) -> None:
        nonlocal num_bytes
        checksums[at] = started.wait()
        landed(pieces[at])
        with lock:
            num_bytes += len(pieces[at][1])
            progress(num_bytes)

    def few() -> list[int]:
        places: list[int] = []
        num_bytes = 0
        while num_bytes < AT_ONCE_BYTES and (at := next_piece()) is not None:
            places.append(at)
            num_bytes += len(pieces[at][1])
        return places

    def work_at_once(several: Callable[[Sequence[Piece]], list[int]]) -> None:
        try:
            while not errors and (places := few()):
                if cancelled():
                    raise TransferCancelled
                for at, checksum in zip(places, several([pieces[at] for at in places]), strict=True):
                    finish(at, EndedCopy(checksum))
        except BaseException as error:
            errors.append(error)

    def work() -> None:
        if several is not None:
            work_at_once(several)
            return
        under_way: deque[tuple[int, DeviceCopy]] = deque()
        try:
            while not errors:
                at = next_piece()
                if at is None:
                    break
                if cancelled():
                    raise TransferCancelled
                under_way.append((at, copy(*pieces[at])))
                while under_way and (len(under_way) >= UNDER_WAY or under_way[0][1].done()):
                    finish(*under_way.popleft())
            while under_way:
                finish(*under_way.popleft())
        except BaseException as error:
            errors.append(error)
            for _, started in under_way:
                with suppress(Exception):  # the first error counts, but memory that the device still uses must not be freed
                    started.wait()

    helpers = [threading.Thread(target=work, name="transfer", daemon=True) for _ in range(min(NUM_THREADS, len(pieces)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return checksums
