"""Messages between the daemon and the fork server, one per packet."""

from __future__ import annotations

import msgspec

PACKET_BYTES, MAX_DESCRIPTORS = 64 << 10, 250  # the kernel passes 253 descriptors at most with a packet


class ForkEngine(msgspec.Struct, frozen=True, array_like=True):
    """Asks the fork server for an engine. Descriptors are sent with it: the pipe to which the engine's exit status is written, the
    engine's stderr, and the descriptors named in its arguments.

    name: name of the process, as `ps -o comm` shows it; the kernel keeps 15 characters. arguments: the arguments of `python -m
    engine`. numbers: for each descriptor after the first two, the number that it gets in the engine."""

    name: str
    arguments: list[str]
    numbers: list[int]


class Forked(msgspec.Struct, frozen=True, array_like=True):
    """The fork server's answer to ForkEngine. pid: the engine's process id; 0 if no engine was forked. A pidfd of the engine is
    sent with the answer. problem: why no engine was forked; "" if one was."""

    pid: int
    problem: str = ""
