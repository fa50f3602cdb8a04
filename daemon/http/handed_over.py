"""Client connections that outlive the daemon: systemd's FD store keeps their sockets over a restart, with what the next daemon has
to know of them.

The sockets may be thousands, too many for the store. So they are sent into a Unix socket that nobody reads, behind a memfd with the
account of them, and the store holds that one socket (see daemon/engines/kept_device.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from daemon.process.fd_store import FdStore
from daemon.streams.so_far import ConnectionSoFar
from engine.memory import handles

log = logging.getLogger("hearthd.http")
NAME = "connections"
VERSION = 1
QUEUE_LIMIT_S = 2.0  # a queue that takes no more descriptors never will


class Listed(msgspec.Struct, frozen=True):
    """A connection in the account. listener: whose it is, "main" or "admin"."""

    listener: str
    connection: ConnectionSoFar


class Account(msgspec.Struct, frozen=True):
    """What goes with the sockets. connections: in their order. stored: packed responses that later requests may follow."""

    version: int
    connections: list[Listed]
    stored: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Account)


def keep(store: FdStore, sockets: Sequence[int], connections: Sequence[Listed], stored: bytes) -> None:
    """Gives duplicates of the sockets to the store. Raises OSError if that is impossible."""
    content = os.fdopen(os.memfd_create(NAME, os.MFD_CLOEXEC), "w+b")
    queue, ours = socket.socketpair()
    with content, queue, ours:
        content.write(_encoder.encode(Account(VERSION, list(connections), stored)))
        content.flush()
        ours.settimeout(QUEUE_LIMIT_S)
        handles.send(ours, [content.fileno(), *sockets], 0, 0)
        store.put(NAME, queue.fileno())


class Left(NamedTuple):
    """What the daemon before this one has left. stored: its stored responses, as in Account."""

    connections: list[tuple[socket.socket, Listed]]
    stored: bytes


def take(store: FdStore) -> Left:
    """Returns what the store keeps, and removes it from there: a connection is gone on with once. Failures are logged."""
    found = store.take(NAME)
    if found is None:
        return Left([], b"")
    store.remove(NAME)
    fds: list[int] = []
    try:
        with socket.socket(fileno=found) as queue:
            queue.setblocking(False)  # all of it is there
            fds = handles.receive(queue).handles
        with os.fdopen(fds.pop(0), "rb") as content:
            content.seek(0)
            account = _decoder.decode(content.read())
        if account.version != VERSION or len(account.connections) != len(fds):
            raise ValueError("another version has written them")
    except (OSError, ValueError, IndexError) as error:  # ValueError includes msgspec's
        log.warning("the connections of before the restart are lost: %s", error)
        handles.close(fds)
        return Left([], b"")
    taken: list[tuple[socket.socket, Listed]] = []
    for fd, listed in zip(fds, account.connections, strict=True):
        with contextlib.suppress(OSError):  # its client is gone
            sock = socket.socket(fileno=fd)
            sock.setblocking(False)
            taken.append((sock, listed))
    return Left(taken, account.stored)
