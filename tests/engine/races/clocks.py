"""Vector clocks, and the memory whose accesses are compared by them.

An actor is a thread of the host or a stream of the device. Its clock says which operations of every actor have ended, for certain,
before its next one. Of two accesses to the same memory, one of them a write, the earlier must be in the clock of the later.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


class Clock(dict[str, int]):
    """The number of each actor's operations that have ended."""

    def join(self, other: Clock) -> None:
        for actor, number in other.items():
            if number > self.get(actor, 0):
                self[actor] = number

    def knows(self, actor: str, number: int) -> bool:
        return self.get(actor, 0) >= number


@dataclass(slots=True)
class _Access:
    number: int
    what: str


@dataclass(slots=True)
class _Place:
    """The accesses to one piece of memory that a later one must come after: the last write, and all reads since, by actor."""

    writer: str = ""
    write: _Access | None = None
    reads: dict[str, _Access] = field(default_factory=dict)


class Memory:
    """All memory, in pieces of any kind of name. faults: what was found, each once, in words."""

    def __init__(self) -> None:
        self._places: dict[Hashable, _Place] = {}
        self.faults: dict[str, None] = {}

    def fault(self, text: str) -> None:
        self.faults[text] = None

    def read(self, name: Hashable, kind: str, actor: str, clock: Clock, what: str) -> None:
        """Notes that `actor`, whose operation `what` is number clock[actor], reads a piece. kind: in words, for faults."""
        place = self._places.setdefault(name, _Place())
        self._after_write(place, actor, clock, f"{what} on {actor} reads {kind}")
        place.reads[actor] = _Access(clock[actor], what)

    def write(self, name: Hashable, kind: str, actor: str, clock: Clock, what: str) -> None:
        place = self._places.setdefault(name, _Place())
        does = f"{what} on {actor} writes {kind}"
        self._after_write(place, actor, clock, does)
        for reader, access in place.reads.items():
            if reader != actor and not clock.knows(reader, access.number):
                self.fault(f"{does} that {access.what} on {reader} may still read")
        place.reads.clear()
        place.writer, place.write = actor, _Access(clock[actor], what)

    def _after_write(self, place: _Place, actor: str, clock: Clock, does: str) -> None:
        if place.write is not None and place.writer != actor and not clock.knows(place.writer, place.write.number):
            self.fault(f"{does} that {place.write.what} on {place.writer} may still write")
