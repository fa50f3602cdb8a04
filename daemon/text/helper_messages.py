"""Messages between the daemon and the text helper, one a packet. The socket of a new worker travels with `Fork`."""

from __future__ import annotations

import msgspec


class Fork(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for a worker on the socket that comes with it. `number`: the daemon's name for it, never used twice."""

    number: int


class Kill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for the end of a worker that does not end by itself."""

    number: int


class Forked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers Fork. `problem`: "" or why there is no worker; `pid` is then 0."""

    number: int
    pid: int
    problem: str = ""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tells that a worker is gone. `exit_code`: as subprocess has it, minus the signal's number if one ended it; `peak_bytes`: the
    most memory it had resident; `last_words`: the end of what it wrote to its standard error."""

    number: int
    exit_code: int
    peak_bytes: int
    last_words: str


ToHelper = Fork | Kill
FromHelper = Forked | Ended
PACKET_BYTES = 16 << 10  # every message is shorter
