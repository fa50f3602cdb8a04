"""The engine's sign of life: what its loop does, and since when, in the memory of the step journal.

Only the loop that computes writes it: a separate thread would go on beating while a kernel hangs. Writing takes no system call, and
the daemon reads it without a message.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

from engine.protocol import PULSE_AT

BEAT_EVERY_S = 5.0  # the longest time between beats while the loop is idle
_fields = struct.Struct("<dddB")


class Doing(IntEnum):
    """What the engine's loop does from the time of a beat on."""

    IDLE = 0  # waits, at most BEAT_EVERY_S
    TURN = 1  # takes in messages, plans a step
    STEP = 2
    CAPTURE = 3  # captures steps of one size, which may compile kernels


class Pulse(NamedTuple):
    """One beat, as the daemon reads it. at_s: when it was written, by time.monotonic(), which all processes share; 0.0 before the
    first.

    expected_s: the usual seconds of the step, from earlier ones; 0.0 if too few of its size have run. first_since_s: a model's
    first step runs in a thread of its own; this is when its last weights arrived, if it is still computing; 0.0 if there is no such
    step."""

    at_s: float
    expected_s: float
    first_since_s: float
    doing: int


def write_pulse(page: Any, at_s: float, expected_s: float, first_since_s: float, doing: int) -> None:
    """Writes a beat to `page`, the step journal's memory. A reader may see it half written, but judges only beats that are seconds
    old."""
    _fields.pack_into(page, PULSE_AT, at_s, expected_s, first_since_s, doing)


def read_pulse(page: Any) -> Pulse:
    return Pulse._make(_fields.unpack_from(page, PULSE_AT))
