"""Copies between a device and the host in parallel, beside the steps of other models: the threads hold no lock while they copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

NUM_THREADS = 2  # more gain nothing on the machines measured: one or two saturate a memory channel's worth

# (address on the device, uint8 array of the host)
Piece = tuple[int, Any]


class TransferCancelled(Exception):
    """`cancelled()` became true."""


def transfer(
    copy: Callable[[int, Any], int],
    pieces: Sequence[Piece],
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> list[int]:
    """Copies every piece by `copy` (ChunkMemory.copy_in or copy_out) and returns their checksums. progress: bytes done so far.

    Raises the first error of a copy, or TransferCancelled; no copy is under way then."""
    checksums = [0] * len(pieces)
    errors: list[BaseException] = []
    order = iter(range(len(pieces)))
    lock = threading.Lock()
    num_bytes = 0

    def work() -> None:
        nonlocal num_bytes
        try:
            while not errors:
                with lock:
                    at = next(order, None)
                if at is None:
                    return
                if cancelled():
                    raise TransferCancelled
                checksums[at] = copy(*pieces[at])
                with lock:
                    num_bytes += len(pieces[at][1])
                    progress(num_bytes)
        except BaseException as error:
            errors.append(error)

    helpers = [threading.Thread(target=work, name="transfer", daemon=True) for _ in range(min(NUM_THREADS, len(pieces)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return checksums
