"""Decides what each thread of a load does next: a read from a file, or one that another rank of the model has read already."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from loader.reading.range_plan import Read
from loader.reading.shared_reads import Offer, SharedReads

# How long a load whose other reads are done waits for what other ranks read or take, before it does without them. Ranks begin
# within some milliseconds of each other, and a read takes a few.
PATIENCE_S = 0.5
_LOOK_EVERY_S = 0.0005


@dataclass(slots=True, frozen=True)
class Turn:
    """The next read that a thread carries out. place: the read's index in the plan. owner: the rank that reads it for all; -1: it
    is not shared. number: its number among the owner's reads. given: its bytes, which the owner has read; None: it is read from the
    file. offer: called with its bytes, offers them to the other ranks; None: it is offered to nobody."""

    place: int
    read: Read
    owner: int = -1
    number: int = -1
    given: memoryview | None = None
    offer: Callable[[memoryview], None] | None = None


class ReadOrder:
    """The reads of a load that no thread has begun. shared: through which the ranks of a split model share reads; None: all reads
    are this process's own. Several threads may call the methods at once.

    Reads begin in the order of the plan, but what another rank has read is taken first, because that rank may wait for its slot.
    Nothing is waited for while there is anything else to read."""

    def __init__(self, reads: Sequence[Read], shared: SharedReads | None = None) -> None:
        self._shared = shared
        self._own: deque[Turn] = deque()
        self._by_owner: list[deque[Turn]] = [] if shared is None else [deque() for _ in range(shared.size)]
        self._lock = threading.Lock()
        self._waits_since_s: float | None = None
        num_shared = 0
        for place, read in enumerate(reads):
            if shared is None or not read.is_shared:
                self._own.append(Turn(place, read))
                continue
            number, owner = divmod(num_shared, shared.size)
            self._by_owner[owner].append(Turn(place, read, owner, number))
            num_shared += 1

    def next(self, stopped: Callable[[], bool]) -> Turn | None:
        """Returns what the calling thread does next, and waits if that depends on another rank. Returns None if nothing is left,
        or if stopped() returns True."""
        while not stopped():
            with self._lock:
                turn = self._ready()
                if turn is not None or not (self._own or any(self._by_owner)):
                    return turn
            time.sleep(_LOOK_EVERY_S)
        return None

    def end(self, turn: Turn) -> None:
        """Tells the other ranks that a turn has ended."""
        if (shared := self._shared) is None:
            return
        if turn.owner == shared.rank:
            shared.end(turn.number)
        elif turn.given is not None:
            shared.take(turn.owner, turn.number)

    def _ready(self) -> Turn | None:
        """Removes and returns the turn that comes next; None if there is nothing left but what other ranks must do first."""
        if self._shared is None:
            return self._own.popleft() if self._own else None
        if (taken := self._offered(self._shared)) is not None:
            return taken
        ours = self._by_owner[self._shared.rank]
        may_offer = bool(ours) and self._shared.has_room(ours[0].number)
        if may_offer and (not self._own or ours[0].place < self._own[0].place):
            self._waits_since_s = None
            turn = ours.popleft()
            return replace(turn, offer=partial(self._shared.offer, turn.number, turn.read))
        if self._own:
            return self._own.popleft()
        return self._alone(self._shared)

    def _offered(self, shared: SharedReads) -> Turn | None:
        """Removes and returns a read that another rank has carried out. Makes reads this rank's own that are offered to nobody."""
        for owner, turns in enumerate(self._by_owner):
            while owner != shared.rank and turns:
                turn = turns[0]
                offer = shared.look(owner, turn.number, turn.read)
                if offer is Offer.COMING:
                    break
                turns.popleft()
                if offer is Offer.READY:
                    self._waits_since_s = None
                    return replace(turn, given=shared.data(owner, turn.number))
                shared.take(owner, turn.number)
                self._own.append(turn)
        return None

    def _alone(self, shared: SharedReads) -> Turn | None:
        """Removes and returns a read that waits for another rank, once it has waited long enough."""
        now = time.monotonic()
        if self._waits_since_s is None:
            self._waits_since_s = now
        if now - self._waits_since_s < PATIENCE_S:
            return None
        for turns in self._by_owner:
            if turns:
                turn = turns.popleft()
                if turn.owner != shared.rank:
                    shared.take(turn.owner, turn.number)
                return turn
        return None
