"""Copies between a device and the host, beside the steps of other models: by a few threads, which hold no lock while they copy,
where the host does the copying; several under way at a time where the device does it by itself."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from engine.memory.chunk_memory import Copy

NUM_THREADS = 2  # more gain nothing on the machines measured: one or two saturate a memory channel's worth
# Of a thread: the next one is there for the device when one ends, and a cancellation waits for no more than these.
UNDER_WAY = 4

# (address on the device, uint8 array of the host)
Piece = tuple[int, Any]


class TransferCancelled(Exception):
    """`cancelled()` became true."""


def transfer(
    copy: Callable[[int, Any], Copy],
    pieces: Sequence[Piece],
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda num_bytes: None,
    landed: Callable[[Piece], None] = lambda piece: None,
    next_piece: Callable[[], int | None] | None = None,
) -> list[int]:
    """Copies every piece by `copy` (ChunkMemory.copy_in or copy_out) and returns their checksums. progress: bytes done so far;
    landed: of each piece that is there, in any thread. next_piece: the place of one to copy, which a thread may have to wait for,
    or None, once for each of NUM_THREADS; else all are copied in their order.

    Raises the first error of a copy, or TransferCancelled; no copy is under way then."""
    checksums = [0] * len(pieces)
    errors: list[BaseException] = []
    next_piece = next_piece or partial(next, iter(range(len(pieces))), None)
    lock = threading.Lock()
    num_bytes = 0

    def finish(at: int, started: Copy) -> None:
        nonlocal num_bytes
        checksums[at] = started.wait()
        landed(pieces[at])
        with lock:
            num_bytes += len(pieces[at][1])
            progress(num_bytes)

    def work() -> None:
        under_way: deque[tuple[int, Copy]] = deque()
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
                with suppress(Exception):  # the first error counts; but nobody may free what the device still reads or writes
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
