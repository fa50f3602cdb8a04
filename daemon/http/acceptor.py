"""Accepts the connections of a listening socket, as many as the limit of open file descriptors allows.

The kernel gives a new descriptor the lowest free number, so the number of a new connection shows how many are left, whoever uses
the others: engines, text workers, files. Connections with a number near the limit are answered 503 and closed. The highest numbers
are reserved for the daemon's own work and for operators. asyncio's own server is not used, because without descriptors it closes
connections unanswered and may even stop listening.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from daemon.http.client_addresses import REFUSED, SERVED, UNCOUNTED, ClientAddresses
from daemon.process.shortage import SHORTAGE

log = logging.getLogger("hearthd")
ACCEPTED_AT_ONCE = 64  # the most connections accepted before the event loop does other work
PAUSE_S = 1.0
REFUSED_FOR_S = 5.0  # how long a refused client may take to send its request and read the answer
HANDSHAKE_LIMIT_S = 10.0  # how long a client's TLS handshake may take, counted from the connection
GOODBYE_LIMIT_S = 5.0  # how long a client may take to answer that its TLS connection is closed
_GONE = (errno.ECONNABORTED, errno.EPROTO)  # the client closed the connection before it was accepted

# Makes the protocol of a connection. The argument is a callback that the protocol calls when the connection is closed.
Protocols = Callable[[Callable[[], None]], asyncio.BaseProtocol]
# Returns the TLS settings for a new connection, or None for one without TLS.
TlsContext = Callable[[], ssl.SSLContext | None]


@dataclass(slots=True, frozen=True)
class Bounds:
    """The numbers of file descriptors from which a listener limits its connections. A new connection whose descriptor has the
    number refused_from or a higher one is answered 503. After a connection with the number pause_from or a higher one, the listener
    pauses accepting."""

    refused_from: int
    pause_from: int


class Room:
    """The Bounds of each kind of listener, which divide the process's file descriptors among them. clients: the Bounds of the API's
    listeners. watchers: those of the listeners for metrics and of the status socket. operators: those of the control socket, which
    may use all descriptors. limit: the most descriptors that the process may have open."""

    def __init__(self, limit: int) -> None:
        num_spare = min(64, limit // 4)  # kept for the daemon's own work
        spare_from = limit - num_spare
        self.clients = Bounds(spare_from - min(32, limit // 8), spare_from)
        self.watchers = Bounds(limit - num_spare // 2, limit - num_spare // 2)  # metrics and status socket: needed in a shortage
        self.operators = Bounds(limit, limit)  # the control socket: its users may do everything


@dataclass(slots=True, frozen=True)
class Crowd:
    """The limit on the connections that one client may have open. addresses: counts each client's connections. refuse: makes the
    protocol that answers a connection above the limit."""

    addresses: ClientAddresses
    refuse: Protocols


class Acceptor:
    """Accepts the connections of one listening socket until it is stopped, and then closes the socket."""

    def __init__(
        self,
        listener: socket.socket,
        serve: Protocols,
        refuse: Protocols,
        bounds: Bounds,
        crowd: Crowd | None = None,
        tls: TlsContext = lambda: None,
    ) -> None:
        """serve: makes the protocol of a connection. refuse: makes the protocol that answers 503 when few descriptors are left.
        bounds: the descriptor numbers at which that begins. crowd: the limit on the connections of one client, which count before
        their TLS handshake; None for no limit. tls: returns the TLS settings for a new connection, or None."""
        self._loop = asyncio.get_running_loop()
        self._listener, self._serve, self._refuse = listener, serve, refuse
        self._bounds, self._crowd, self._tls = bounds, crowd, tls
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[Any]] = set()

    def start(self, backlog: int) -> None:
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._loop.add_reader(self._listener.fileno(), self._on_readable)

    def stop(self) -> None:
        """Stops accepting and closes the listening socket. Connections already accepted continue."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    async def connected(self, timeout_s: float) -> None:
        """Waits until every accepted connection has been handed to its protocol, after its TLS handshake if it uses TLS, but at
        most timeout_s seconds."""
        if self._connecting:
            await asyncio.wait(self._connecting, timeout=timeout_s)

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
        """Ends the pause in accepting, if there is one. It is called when a refused connection was closed, which frees a
        descriptor."""
        if self._timer is not None:
            self._timer.cancel()
            self._go_on()

    def _pause(self) -> None:
        """Stops accepting for PAUSE_S seconds, or until a refused connection is closed. New clients wait in the kernel's queue
        until accepting goes on."""
        # accepting again at once would fail in the same way and keep a core busy
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
        options: dict[str, Any] = {}
        if (context := self._tls()) is not None:
            limit_s = HANDSHAKE_LIMIT_S if make is self._serve else REFUSED_FOR_S
            options = {"ssl": context, "ssl_handshake_timeout": limit_s, "ssl_shutdown_timeout": GOODBYE_LIMIT_S}
        try:
            await self._loop.connect_accepted_socket(partial(make, closed), connection, **options)
        except OSError as error:  # ssl.SSLError is an OSError; the protocol has not seen the connection yet
            log.debug("a connection ended as it was accepted: %s", error)
            connection.close()
            closed()


class Refusal(asyncio.Protocol):
    """The protocol of a connection that is refused. It answers the client's first bytes with an error, then reads and drops what
    follows until the client closes the connection, at most REFUSED_FOR_S seconds: a client that is still sending could lose the
    answer if the server closed the connection first."""

    def __init__(self, answer: bytes, closed: Callable[[], None]) -> None:
        """answer: a whole HTTP response. closed: called when the connection is closed."""
        self._answer, self._closed = answer, closed
        self._transport: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._limit = asyncio.get_running_loop().call_later(REFUSED_FOR_S, self._transport.abort)  # type: ignore[union-attr]

    def data_received(self, data: bytes) -> None:
        if self._answer and self._transport is not None:
            self._transport.write(self._answer)
            if self._transport.can_write_eof():  # over TLS the end is not signalled; the client knows the answer's length
                self._transport.write_eof()
            self._answer = b""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._closed()
