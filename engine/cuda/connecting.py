"""Connects a rank with the other ranks (devices) of its split model. If one of these has died before it connected, the wait for it
ends.

A library that connects ranks may wait forever for a rank that is gone, as NCCL does in ncclCommInitRank. So the library is called
in a thread of its own, which is abandoned if a device of the split model is lost meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time

from engine.contracts.ranks import GroupBroken
from engine.cuda.collectives import Collectives, Connects
from loader.threads import Thread
from scheduler.batch.plan import LongArray

log = logging.getLogger("engine")

WATCH_S = 0.02  # between looks at the group's flag
CONNECT_LIMIT_S = 60.0  # NCCL takes a second or some; this is for ranks that live and never come


class Connecting:
    """The attempt of rank `rank` to connect with the other ranks (devices) of a split model, `size` in all, in a thread of its own.
    connects: the library that connects them. group_id: an id of this set of ranks, the same on all of them."""

    def __init__(self, connects: Connects, group_id: bytes, rank: int, size: int) -> None:
        self._connects, self._group_id, self._rank, self._size = connects, group_id, rank, size
        self._title = f"rank {rank} of {size}"
        self._lock = threading.Lock()  # held while one thread hands the connection over, and while the other one gives it up
        self._ended = threading.Event()
        self._made: Collectives | None = None
        self._error: Exception | None = None
        self._is_given_up = False

    def connected(self, broken: LongArray) -> Collectives:
        """Makes the connection and returns it. broken [1]: not 0 once a device of the split model has been lost. Raises GroupBroken
        if a device of the split model is lost meanwhile, RuntimeError after CONNECT_LIMIT_S, and what Connects.connect raises."""
        began_s = time.monotonic()
        Thread(target=self._connect, name="connect").start()
        while not self._ended.wait(WATCH_S):
            if broken[0] and self._given_up():
                raise GroupBroken(f"{self._title}: the group has lost a device while its ranks connected")
            if time.monotonic() - began_s > CONNECT_LIMIT_S and self._given_up():
                raise RuntimeError(f"{self._title}: the group's devices have not connected within {CONNECT_LIMIT_S:.0f} s")
        if self._error is not None:
            raise self._error
        assert self._made is not None
        return self._made

    def _given_up(self) -> bool:
        """Gives the attempt up and returns True, unless the thread has connected by now; then returns False."""
        with self._lock:
            self._is_given_up = self._made is None
        if self._is_given_up:
            self._connects.give_up()
        return self._is_given_up

    def _connect(self) -> None:
        try:
            made = self._connects.connect(self._group_id, self._rank, self._size)
            with self._lock:
                if not self._is_given_up:
                    self._made = made
            if self._is_given_up:
                made.abort()
                made.release()
        except Exception as error:
            self._error = error
            if self._is_given_up:
                log.info("%s: its connection was given up: %s", self._title, error)
        self._ended.set()
