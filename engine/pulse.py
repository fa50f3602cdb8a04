"""The engine's sign of life: what its loop does, and since when, in the memory of the step journal.

Only the loop that computes writes it. A thread beside it would go on beating while a kernel hangs. Writing takes no system call,
and the daemon reads it without a message.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

from engine.protocol import PULSE_AT

BEAT_EVERY_S = 5.0  # at least, while nothing happens
_fields = struct.Struct("<dddB")


class Doing(IntEnum):
    """What the loop does from a beat on."""

    IDLE = 0  # waits, at most BEAT_EVERY_S
    TURN = 1  # takes in messages, plans a step
    STEP = 2
    CAPTURE = 3  # makes steps of one size ready to be run again, which may compile kernels


class Pulse(NamedTuple):
    """One beat, as the daemon reads it. at_s: time.monotonic() of it, which all processes share; 0.0 before the first.

    expected_s: what the step usually takes, by the steps before; 0.0 where too few of its size were seen. first_since_s: since
    when the weights are there behind which a first step still computes, in a thread of its own; 0.0 where there is none."""

    at_s: float
    expected_s: float
    first_since_s: float
    doing: int


def write_pulse(page: Any, at_s: float, expected_s: float, first_since_s: float, doing: int) -> None:
    """page: the step journal's. A reader may see a beat half written; it judges by those that are seconds old."""
    _fields.pack_into(page, PULSE_AT, at_s, expected_s, first_since_s, doing)


def read_pulse(page: Any) -> Pulse:
    return Pulse._make(_fields.unpack_from(page, PULSE_AT))
