"""Messages between the daemon and the text helper, one per packet. The socket of a new worker is sent with `Fork`."""

from __future__ import annotations

import msgspec


class Fork(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks the helper for a worker that serves the socket sent with this message. number: the daemon's number for the worker, never
    used twice."""

    number: int


class Kill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks the helper to kill a worker that does not end by itself. number: the worker's number, as in `Fork`."""

    number: int


class Forked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The helper's answer to `Fork`. number: the daemon's number for the worker. pid: the worker's process id, 0 if there is no
    worker. problem: why there is none; "" if there is one."""

    number: int
    pid: int
    problem: str = ""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reports that a worker has ended. exit_code: the process's exit code, or the negative number of the signal that ended it;
    peak_bytes: the most memory that it had resident; last_words: the end of what it wrote to its standard error."""

    number: int
    exit_code: int
    peak_bytes: int
    last_words: str


ToHelper = Fork | Kill
FromHelper = Forked | Ended
PACKET_BYTES = 16 << 10  # every message is shorter
