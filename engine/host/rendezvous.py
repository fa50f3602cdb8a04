"""Lets the ranks of a split model wait for each other once, and receive an id from rank 0, through memory that their engines share.
They do this before they connect to exchange partial results; the id is for that connection."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from loader.reading.memory_fence import MemoryFence
from scheduler.batch.plan import LongArray

ID_WORDS = 16  # of 8 bytes
POLL_S = 2e-3


def rendezvous_words(size: int) -> int:
    """Returns the number of 8-byte words of the memory of a rendezvous of `size` ranks. All words are 0 at the beginning."""
    return ID_WORDS + 1 + size


class Rendezvous:
    """One rank's access to a rendezvous, at which all ranks (devices) of a split model wait for each other and rank 0 passes an id
    to the others. words [rendezvous_words(size)]: the shared memory. broken [1]: not 0 once a rank was lost or has left."""

    def __init__(self, words: LongArray, rank: int, broken: LongArray) -> None:
        self._id, self._is_told, self._arrived = words[:ID_WORDS], words[ID_WORDS : ID_WORDS + 1], words[ID_WORDS + 1 :]
        self._rank, self._broken, self._fence = rank, broken, MemoryFence()

    def meet(self, new_id: Callable[[], bytes]) -> bytes | None:
        """Waits until all ranks (devices) of a split model have called this, and returns the same id, 8 * ID_WORDS bytes, on all
        ranks. The id is the result of new_id on rank 0; other ranks do not call new_id. Returns None if a rank is lost before
        that."""
        self._arrived[self._rank] = 1
        self._fence.order()
        if self._rank == 0:
            if not self._awaited(lambda: bool(self._arrived.all())):
                return None
            self._id[:] = np.frombuffer(new_id(), np.int64)
            self._fence.order()
            self._is_told[0] = 1
        elif not self._awaited(lambda: bool(self._is_told[0])):
            return None
        self._fence.order()
        return self._id.tobytes()

    def _awaited(self, is_over: Callable[[], bool]) -> bool:
        """Waits until is_over() returns True, and returns True; returns False once a rank (device) of the split model has been
        lost."""
        while not is_over():
            if self._broken[0]:
                return False
            time.sleep(POLL_S)
        return True
