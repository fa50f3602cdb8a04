"""Keeps client connections open when the daemon restarts: systemd's FD store keeps their sockets over a restart, together with
their states for the next daemon.

There may be thousands of them. So the store gets a single socket, in which all client sockets and the account of their states are
queued (daemon/process/queued_descriptors.py).
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Sequence

import msgspec

from daemon.process.account import Account
from daemon.process.fd_store import FdStore
from daemon.process.formats import Format
from daemon.process.queued_descriptors import queue_of, unqueue
from daemon.streams.so_far import ConnectionSoFar
from engine.memory import handles

log = logging.getLogger("hearthd.http")
NAME = "connections"
FORMAT = Format(version=1, reads_from=1, readable_from=1)


class Listed(msgspec.Struct, frozen=True):
    """The entry of one connection in the account for the next daemon. listener: the name of the listener that accepted it, "main"
    or "admin". connection: its state."""

    listener: str
    connection: ConnectionSoFar


class Content(msgspec.Struct, frozen=True):
    """The content of the account that a daemon leaves for the next one. version: the version of its format. connections: one entry
    for each socket, in the order of the sockets. readable_from: the oldest version of the format whose readers can still read this
    account."""

    version: int
    connections: list[Listed]
    readable_from: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Content)


def keep(store: FdStore, sockets: Sequence[int], connections: Sequence[Listed]) -> None:
    """Puts the sockets into the store, with an account of their states for the next daemon. sockets: file descriptors, which stay
    open in this process. connections: their states, in the same order. Raises OSError if the store does not take them."""
    with contextlib.closing(Account.make(NAME)) as account:
        account.write(_encoder.encode(Content(FORMAT.version, list(connections), FORMAT.readable_from)))
        with queue_of([account.fd, *sockets]) as queue:
            store.put(NAME, queue.fileno())


Left = list[tuple[socket.socket, Listed]]


def take(store: FdStore) -> Left:
    """Returns the connections that an earlier daemon has left in the store, as pairs of socket and state, and removes them from the
    store. [] if there are none or they cannot be read, which is logged."""
    found = store.take(NAME)
    if found is None:
        return []
    store.remove(NAME)
    fds: list[int] = []
    try:
        fds = unqueue(found).handles
        with contextlib.closing(Account(fds.pop(0))) as account:
            content = _decoder.decode(account.read())
        if not FORMAT.reads(content.version, content.readable_from) or len(content.connections) != len(fds):
            raise ValueError("another version has written them")
    except (OSError, ValueError, IndexError) as error:  # msgspec's errors are ValueErrors
        log.warning("the connections of before the restart are lost: %s", error)
        handles.close(fds)
        return []
    taken: Left = []
    for fd, listed in zip(fds, content.connections, strict=True):
        with contextlib.suppress(OSError):  # the client has closed the connection
            sock = socket.socket(fileno=fd)
            sock.setblocking(False)
            taken.append((sock, listed))
    return taken
