"""Takes the connections of a listening socket, as many as descriptors allow.

A new descriptor is the lowest number that is free, so the number of a new connection tells how many are left, whoever has the
others: engines, text workers, files. Connections near the limit are answered 503 and closed; the last numbers are kept for the
daemon's own work and for operators. The event loop's own server does none of this: out of descriptors it closes connections
unanswered, and it can lose the listener itself.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from daemon.http.client_addresses import REFUSED, SERVED, UNCOUNTED, ClientAddresses
from daemon.process.shortage import SHORTAGE

log = logging.getLogger("hearthd")
ACCEPTED_AT_ONCE = 64  # between two turns of the loop
PAUSE_S = 1.0
REFUSED_FOR_S = 5.0  # a refused client may take to send its request and to read the answer
_GONE = (errno.ECONNABORTED, errno.EPROTO)  # the client went before it was accepted

# Makes the protocol of a connection; the protocol calls what it is given when the connection is closed.
Protocols = Callable[[Callable[[], None]], asyncio.BaseProtocol]


@dataclass(slots=True, frozen=True)
class Bounds:
    """Descriptors of a listener's connections. From refused_from on they are answered 503, from pause_from on accepting pauses
    after each one."""

    refused_from: int
    pause_from: int


class Room:
    """Says which of `limit` descriptors each kind of listener may fill."""

    def __init__(self, limit: int) -> None:
        num_spare = min(64, limit // 4)  # for the daemon's own work
        spare_from = limit - num_spare
        self.clients = Bounds(spare_from - min(32, limit // 8), spare_from)
        self.watchers = Bounds(limit - num_spare // 2, limit - num_spare // 2)  # metrics, status socket: to look into a shortage
        self.operators = Bounds(limit, limit)  # who may open the control socket may do everything


@dataclass(slots=True, frozen=True)
class Crowd:
    """What bounds the connections of one client. refuse: those above its limit."""

    addresses: ClientAddresses
    refuse: Protocols


class Acceptor:
    """Accepts the connections of one listener, and closes it in the end."""

    def __init__(
        self, listener: socket.socket, serve: Protocols, refuse: Protocols, bounds: Bounds, crowd: Crowd | None = None
    ) -> None:
        """refuse: where descriptors are short. crowd: None: a client may have any number of connections."""
        self._loop = asyncio.get_running_loop()
        self._listener, self._serve, self._refuse = listener, serve, refuse
        self._bounds, self._crowd = bounds, crowd
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[Any]] = set()

    def start(self, backlog: int) -> None:
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._loop.add_reader(self._listener.fileno(), self._on_readable)

    def stop(self) -> None:
        """Connections that were accepted go on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    def _on_readable(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _GONE:
                    continue
                SHORTAGE.note(f"pauses in accepting ({error.strerror})")
                self._pause()
                return
            number = connection.fileno()
            if number < self._bounds.refused_from:
                self._serve_unless_crowded(connection, address)
            else:
                SHORTAGE.note("connections answered 503")
                self._take(connection, self._refuse, self._on_refusal_closed)
            if number >= self._bounds.pause_from:
                self._pause()
                return

    def _on_refusal_closed(self) -> None:
        """There is room for the next to be told."""
        if self._timer is not None:
            self._timer.cancel()
            self._go_on()

    def _pause(self) -> None:
        """Until a refused connection is closed, or for a moment. What waits stays in the kernel's queue; looking again at once
        would find the same and take a core."""
        self._loop.remove_reader(self._listener.fileno())
        self._timer = self._loop.call_later(PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener.fileno(), self._on_readable)

    def _serve_unless_crowded(self, connection: socket.socket, address: object) -> None:
        place = UNCOUNTED
        if self._crowd is not None and isinstance(address, tuple):  # a Unix socket's clients have no address
            place = self._crowd.addresses.enter(address[0])
        if place.outcome == SERVED:
            self._take(connection, self._serve, place.leave)
        elif place.outcome == REFUSED and self._crowd is not None:
            self._take(connection, self._crowd.refuse, place.leave)
        else:
            place.leave()
            connection.close()

    def _take(self, connection: socket.socket, make: Protocols, closed: Callable[[], None]) -> None:
        connection.setblocking(False)
        task = self._loop.create_task(self._connect(connection, make, closed))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket, make: Protocols, closed: Callable[[], None]) -> None:
        try:
            await self._loop.connect_accepted_socket(partial(make, closed), connection)
        except OSError as error:
            log.debug("a connection ended as it was accepted: %s", error)
            connection.close()
            closed()


class Refusal(asyncio.Protocol):
    """A connection there is no room for: its first bytes are answered, the rest is read and dropped until the client closes, since
    closing first would take the answer from a client that still sends."""

    def __init__(self, answer: bytes, closed: Callable[[], None]) -> None:
        """answer: a whole HTTP response."""
        self._answer, self._closed = answer, closed
        self._transport: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._limit = asyncio.get_running_loop().call_later(REFUSED_FOR_S, self._transport.abort)  # type: ignore[union-attr]

    def data_received(self, data: bytes) -> None:
        if self._answer and self._transport is not None:
            self._transport.write(self._answer)
            self._transport.write_eof()
            self._answer = b""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._closed()
