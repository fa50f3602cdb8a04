"""Records the engine's sign of life in the memory of the step journal: what the engine's loop does, and since when.

Only the loop itself writes this record, because a separate thread would go on writing while a kernel hangs. Writing takes no system
call, and the daemon reads the memory without asking the engine."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

from engine.protocol import PULSE_AT

BEAT_EVERY_S = 5.0  # the longest time between beats while the loop is idle
_fields = struct.Struct("<dddB")


class Doing(IntEnum):
    """The activities of the engine's loop that a beat (a record of its sign of life) can report."""

    IDLE = 0  # waits, at most BEAT_EVERY_S
    TURN = 1  # takes in messages, plans a step
    STEP = 2
    CAPTURE = 3  # captures steps of one size, which may compile kernels


class Pulse(NamedTuple):
    """One beat: the sign of life that the engine's loop wrote last, as the daemon reads it.
    at_s: when it was written, by time.monotonic(), which is the same in all processes; 0.0 before the first beat.
    doing: what the loop does, a value of Doing.
    expected_s: the usual seconds of the step that runs, learned from earlier steps; 0.0 if too few of its size have run.
    first_since_s: when the last weights arrived of a model whose first step still runs in a thread of its own; the earliest such
    time, if there are several such models; 0.0 if there is none."""

    at_s: float
    expected_s: float
    first_since_s: float
    doing: int


def write_pulse(page: Any, at_s: float, expected_s: float, first_since_s: float, doing: int) -> None:
    """Writes a beat, the sign of life of the engine's loop, to `page`, the step journal's memory; the values are those of Pulse.
    The daemon may read a beat that is half written; that does no harm, because it acts only on beats that are seconds old."""
    _fields.pack_into(page, PULSE_AT, at_s, expected_s, first_since_s, doing)


def read_pulse(page: Any) -> Pulse:
    return Pulse._make(_fields.unpack_from(page, PULSE_AT))
