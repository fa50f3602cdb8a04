"""Decides which read a thread of a load carries out next, and whether the bytes come from the file or from another rank (device of
a split model) that has already read them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

from loader.reading.range_plan import Read
from loader.reading.shared_reads import Offer, SharedReads

# How long a load whose other reads are done waits for what other ranks read or take, before it does without them. Ranks begin
# within some milliseconds of each other, and a read takes a few.
PATIENCE_S = 0.5
_LOOK_EVERY_S = 0.0005


@dataclass(slots=True, frozen=True)
class Turn:
    """A read that a thread of a load carries out next, and where its bytes come from; not a model's turn on its device. place: the
    read's index in the plan of the load.

    The other fields are about a read that the ranks (devices) of a split model share. owner: the rank that is to carry it out for
    all; -1: the read is not shared. number: the read's index among the reads of the owner. given: the read's bytes, if the owner
    has read them; None: they are read from the file. offer: a function that gives bytes to the other ranks; None: they are given to
    nobody. shared: the memory through which the read is shared; None: it is not shared."""

    place: int
    read: Read
    owner: int = -1
    number: int = -1
    given: memoryview | None = None
    offer: Callable[[memoryview], None] | None = None
    shared: SharedReads | None = None


class ReadOrder:
    """The reads of a load that no thread has begun, and the order in which threads take them. Several threads may call the methods
    at once. shared: the memories through which the ranks (devices) of a split model share reads, each for a different number of
    ranks (shared_by); (): no reads are shared.

    Reads begin in the order of the plan, except that reads which another rank has already carried out come first, because that rank
    may be waiting for its slot. A thread waits only if all remaining reads depend on other ranks."""

    def __init__(self, reads: Sequence[Read], shared: Sequence[SharedReads] = ()) -> None:
        self._own: deque[Turn] = deque()
        by_size = {each.size: _SharedTurns(each) for each in shared}
        self._shared = list(by_size.values())
        self._lock = threading.Lock()
        self._waits_since_s: float | None = None
        for place, read in enumerate(reads):
            if (among := by_size.get(read.num_readers)) is None:
                self._own.append(Turn(place, read))
            else:
                among.add(place, read)

    def next(self, stopped: Callable[[], bool]) -> Turn | None:
        """Removes the calling thread's next read and returns it. If all remaining reads depend on other ranks (devices of a split
        model), it first waits for these. Returns None if no read remains, or if stopped() returns True."""
        while not stopped():
            with self._lock:
                turn = self._ready()
                if turn is not None or not (self._own or any(among.is_left for among in self._shared)):
                    return turn
            time.sleep(_LOOK_EVERY_S)
        return None

    def end(self, turn: Turn) -> None:
        """Records that a thread has carried out the read `turn`, which `next` has returned. If ranks (devices of a split model)
        share the read, the other ranks then see in their shared memory that this rank is done with it."""
        if (shared := turn.shared) is None:
            return
        if turn.owner == shared.rank:
            shared.end(turn.number)
        elif turn.given is not None:
            shared.take(turn.owner, turn.number)

    def _ready(self) -> Turn | None:
        """Removes the read that is to be carried out next and returns it; None if this rank (device of a split model) has to wait
        for other ranks."""
        for among in self._shared:
            if (given := among.offered(self._own)) is not None:
                self._waits_since_s = None
                return given
        ours = [(turn.place, among) for among in self._shared if (turn := among.to_offer()) is not None]
        if ours:
            place, among = min(ours, key=itemgetter(0))
            if not self._own or place < self._own[0].place:
                self._waits_since_s = None
                return among.offering()
        if self._own:
            return self._own.popleft()
        return self._alone()

    def _alone(self) -> Turn | None:
        """Removes one of the reads that ranks (devices of a split model) share, and returns it, so that this rank reads it from the
        file without waiting for others any longer. None if there is no such read, or if this rank has not yet waited PATIENCE_S
        seconds."""
        now = time.monotonic()
        if self._waits_since_s is None:
            self._waits_since_s = now
        if now - self._waits_since_s < PATIENCE_S:
            return None
        return next((turn for among in self._shared if (turn := among.alone()) is not None), None)


class _SharedTurns:
    """The reads that several ranks (devices of a split model) share and that no thread of this rank has begun. Each read is carried
    out by one of the ranks, its owner, which offers the bytes to the others. shared: the memory through which these ranks share
    reads."""

    def __init__(self, shared: SharedReads) -> None:
        self._shared = shared
        self._by_owner = [deque[Turn]() for _ in range(shared.size)]
        self._num_reads = 0

    @property
    def is_left(self) -> bool:
        return any(self._by_owner)

    def add(self, place: int, read: Read) -> None:
        """Appends a read that the ranks share. Must be called in the order of the load's plan of reads. place: the read's index in
        the plan."""
        number, owner = divmod(self._num_reads, self._shared.size)
        self._by_owner[owner].append(Turn(place, read, owner, number, shared=self._shared))
        self._num_reads += 1

    def offered(self, own: deque[Turn]) -> Turn | None:
        """Removes a read whose bytes another rank (device of a split model) offers, and returns it with these bytes; None if no
        bytes are offered. Reads that the rank responsible for them will not offer are moved to `own`, the reads that this rank
        reads from the file for itself."""
        for owner, turns in enumerate(self._by_owner):
            while owner != self._shared.rank and turns:
                turn = turns[0]
                offer = self._shared.look(owner, turn.number, turn.read)
                if offer is Offer.COMING:
                    break
                turns.popleft()
                if offer is Offer.READY:
                    return replace(turn, given=self._shared.data(owner, turn.number))
                self._shared.take(owner, turn.number)
                own.append(turn)
        return None

    def to_offer(self) -> Turn | None:
        """Returns the next read that this rank (device of a split model) carries out for all ranks, but does not remove it
        (`offering` does). None if there is no such read, or if the shared memory has no free slot in which to offer its bytes."""
        turns = self._by_owner[self._shared.rank]
        return turns[0] if turns and self._shared.has_room(turns[0].number) else None

    def offering(self) -> Turn:
        """Removes the next read that this rank (device of a split model) carries out for all ranks, and returns it; the result's
        field `offer` is the function that gives the bytes to the other ranks. Must be called only after `to_offer` has returned
        this read."""
        turn = self._by_owner[self._shared.rank].popleft()
        return replace(turn, offer=partial(self._shared.offer, turn.number, turn.read))

    def alone(self) -> Turn | None:
        """Removes any one of the reads and returns it, so that this rank (device of a split model) reads it from the file for
        itself, even if another rank should carry it out. None if no read is left."""
        for turns in self._by_owner:
            if turns:
                turn = turns.popleft()
                if turn.owner != self._shared.rank:
                    self._shared.take(turn.owner, turn.number)
                return turn
        return None
