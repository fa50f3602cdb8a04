"""Copies between a device and the host while steps of other models run. If the host makes the copies, a few threads copy without
holding the GIL. If the device makes them, several copies are under way at a time.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty
from typing import Any

from engine.memory.chunk_memory import ChunkMemory, CopiesSeveral, DeviceCopies, DeviceCopy, StartsSeveral
from engine.memory.chunk_memory import Piece as Piece
from loader.threads import Thread

NUM_THREADS = 2  # more gain nothing on the machines measured: one or two use all that a memory channel gives
# Copies under way for each thread: the device has a next one when one ends, and a cancellation waits for no more than these.
UNDER_WAY = 4

# Bytes that a thread copies in one call. Between two calls it needs the interpreter lock, which another thread may hold: 1 GB in
# pieces of 512 KiB took 170 ms of two cores with one piece per call, and 101 ms this way (a Xeon).
AT_ONCE_BYTES = 8 << 20

# Bytes and pieces that a device that copies by itself is given in one call. Its fence, its sums and the wait for them cost the host
# some hundred microseconds; the bus takes a millisecond for the bytes.
BATCH_BYTES = 64 << 20
BATCH_PIECES = 128
BATCHES_UNDER_WAY = 3  # calls under way of the only thread: two keep the device busy while the host handles one that has ended


class TransferCancelled(Exception):
    """Raised by `transfer` when its argument `cancelled` returned True."""


@dataclass(slots=True, frozen=True)
class Several:
    """The function `start`, with which `transfer` copies several pieces (each an address on the device and an array of the host) in
    one call, and the limits of such calls. A call gets pieces until they are most_pieces, or have at least most_bytes bytes.
    num_threads threads make calls; each has at most most_under_way calls under way."""

    start: Callable[[Sequence[Piece]], DeviceCopies]
    most_bytes: int
    most_pieces: int
    most_under_way: int
    num_threads: int


@dataclass(slots=True, frozen=True)
class _Ended:
    """A DeviceCopies (copies that can be waited for) that had ended before the object was made. checksums: the checksums of the
    pieces."""

    checksums: list[int]

    def done(self) -> bool:
        return True

    def wait(self) -> list[int]:
        return self.checksums


@dataclass(slots=True, frozen=True)
class _Only:
    """A DeviceCopies (copies that can be waited for) that consists of a single copy."""

    copy: DeviceCopy

    def done(self) -> bool:
        return self.copy.done()

    def wait(self) -> list[int]:
        return [self.copy.wait()]


def copies_several(memory: ChunkMemory, out: bool) -> Several | None:
    """Returns the function, with its limits, by which `transfer` copies several pieces of this memory in one call (the argument
    `several` of `transfer`). Returns None if pieces can only be copied one by one. out: whether the pieces are copied from the
    device to the host."""
    if isinstance(memory, CopiesSeveral):
        copy = partial(memory.copy_several, out=out)
        return Several(lambda pieces: _Ended(copy(pieces)), AT_ONCE_BYTES, sys.maxsize, 1, NUM_THREADS)
    return starts_several(memory, out)


def starts_several(memory: ChunkMemory, out: bool) -> Several | None:
    """Returns the function, with its limits, by which `transfer` starts several copies in one call (the argument `several` of
    `transfer`), for a device that makes copies itself. Returns None for a device that does not. out: whether the pieces are copied
    from the device to the host."""
    if not isinstance(memory, StartsSeveral):
        return None
    return Several(partial(memory.start_several, out=out), BATCH_BYTES, BATCH_PIECES, BATCHES_UNDER_WAY, 1)


def transfer(
    copy: Callable[[int, Any], DeviceCopy],
    pieces: Sequence[Piece],
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda num_bytes: None,
    landed: Callable[[Piece], None] = lambda piece: None,
    next_piece: Callable[[bool], int | None] | None = None,
    several: Several | None = None,
) -> list[int]:
    """Copies every piece (an address on the device and an array of the host) by `copy` (ChunkMemory.copy_in or copy_out) and
    returns the pieces' checksums, in order.
    cancelled: called before each copy; if it returns True, the transfer ends.
    progress: called with the number of bytes copied so far.
    landed: called with each piece that was copied, in any thread.
    next_piece(wait): returns the index of a piece to copy, or, after the last piece, None once for each of NUM_THREADS threads. If
    no piece is ready yet, it waits if `wait` is True, else raises queue.Empty. If next_piece is None, all pieces are copied in
    order.
    several: copies several pieces in one call, in place of `copy` (the result of copies_several or starts_several); None: pieces
    are copied one by one.

    Raises the first error of a copy, or TransferCancelled, after all copies under way have ended."""
    checksums = [0] * len(pieces)
    errors: list[BaseException] = []
    places_left = iter(range(len(pieces)))
    take = next_piece or (lambda wait: next(places_left, None))
    way = several or Several(lambda only: _Only(copy(*only[0])), 1, 1, UNDER_WAY, NUM_THREADS)
    lock = threading.Lock()
    num_bytes = 0

    def few(wait: bool) -> tuple[list[int], bool]:
        """Returns the indices of the pieces to copy in the next call, and whether there may be further pieces after them. wait:
        whether to wait for the first piece if none is ready; the others are taken only if they are ready."""
        places: list[int] = []
        few_bytes = 0
        with suppress(Empty):
            while len(places) < way.most_pieces and few_bytes < way.most_bytes:
                at = take(wait and not places)
                if at is None:
                    return places, False
                places.append(at)
                few_bytes += len(pieces[at][1])
        return places, True

    def finish(places: Sequence[int], started: DeviceCopies) -> None:
        nonlocal num_bytes
        for at, checksum in zip(places, started.wait(), strict=True):
            checksums[at] = checksum
            landed(pieces[at])
            with lock:
                num_bytes += len(pieces[at][1])
                progress(num_bytes)

    def work() -> None:
        under_way: deque[tuple[list[int], DeviceCopies]] = deque()
        more = True
        try:
            while more and not errors:
                places, more = few(wait=not under_way)
                if places:
                    if cancelled():
                        raise TransferCancelled
                    under_way.append((places, way.start([pieces[at] for at in places])))
                elif under_way:  # no piece is ready to be copied
                    finish(*under_way.popleft())
                while under_way and (len(under_way) >= way.most_under_way or under_way[0][1].done()):
                    finish(*under_way.popleft())
            while under_way:
                finish(*under_way.popleft())
        except BaseException as error:
            errors.append(error)
            for _, started in under_way:
                with suppress(Exception):  # the first error is raised, but memory that the device still uses must not be freed
                    started.wait()

    with ExitStack() as helpers:
        with suppress(MemoryError):  # fewer threads copy then
            for _ in range(min(way.num_threads, len(pieces)) - 1):
                helper = Thread(target=work, name="transfer")
                helper.start()
                helpers.callback(helper.join)
        work()
    if errors:
        raise errors[0]
    return checksums
