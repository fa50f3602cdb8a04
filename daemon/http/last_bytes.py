"""Waits, when the daemon stops, until the clients have received what was written for them.

The kernel goes on sending after a process has closed its sockets, but not if the network goes away with the process, as that of a
container does: the client would then get a reset before the end of its answer. So the sockets stay open until their send queues are
empty. The queue of a TCP socket holds the bytes that the peer's kernel has not acknowledged yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import termios
from collections.abc import Sequence

from daemon.http.connection import Connection, ConnectionServer, Runner

log = logging.getLogger("hearthd.http")
LOOK_EVERY_S = 0.02
NUM_EMPTY_LOOKS = 2  # see LastBytes.wait
_TCP_CLOSE = 7  # the state of a connection that has ended on both sides or was reset; TCP_CLOSE in linux/tcp_states.h


class LastBytes:
    """Waits for the bytes that the connections of some servers have not delivered yet. If the daemon closes a connection without
    TLS while bytes are in its send queue, this object keeps the socket open until `end`. runners: the runners of the servers, whose
    setup() must have been called."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        servers = [runner.server for runner in runners]
        self._servers = [server for server in servers if isinstance(server, ConnectionServer)]
        self._seen: list[Connection] = []  # a server forgets its connections when it is cleaned up
        self._kept: dict[Connection, socket.socket] = {}  # duplicates of the sockets of closed connections
        self._given_up: set[Connection] = set()
        for server in self._servers:
            server.on_lost = self._keep

    async def wait(self, limit_s: float, hurry: asyncio.Event) -> int:
        """Waits until all clients have received what is written for them now or are gone, at most limit_s seconds and only until
        `hurry` is set. Returns the number of connections whose bytes were not delivered. These are given up: their buffers are
        dropped, so that no handler goes on waiting for the client, and later calls ignore them.

        A connection counts as delivered when its buffers are found empty NUM_EMPTY_LOOKS times in a row, LOOK_EVERY_S seconds
        apart. Once is not enough: bytes that uvloop still has to encrypt for TLS cannot be seen, but the event loop moves them to
        the kernel's queue between two looks. A connection without any bytes costs only one round of the event loop."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        self._seen = list(dict.fromkeys([*self._seen, *(each for server in self._servers for each in _connections(server))]))
        unsent = set(self._with_unsent())
        await asyncio.sleep(0)
        num_empty_looks = dict.fromkeys(unsent.union(self._with_unsent()), 0)
        if num_empty_looks and limit_s > 0 and not hurry.is_set():
            log.info(
                "%d clients have not received all that was written for them; the stop waits for at most %.1f s",
                len(num_empty_looks),
                limit_s,
            )
        while num_empty_looks and not hurry.is_set() and (left_s := until_s - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_EVERY_S, left_s)):
                    await hurry.wait()
            for connection, num in list(num_empty_looks.items()):
                num_empty_looks[connection] = 0 if self._has_unsent(connection) else num + 1
                if num_empty_looks[connection] == NUM_EMPTY_LOOKS:
                    del num_empty_looks[connection]
        left = [connection for connection in num_empty_looks if self._has_unsent(connection)]
        for connection in left:
            self._give_up(connection)
        return len(left)

    def end(self) -> None:
        """Closes the sockets that were kept."""
        for sock in self._kept.values():
            sock.close()
        self._kept.clear()

    def _with_unsent(self) -> list[Connection]:
        return [each for each in {*self._seen, *self._kept} if each not in self._given_up and self._has_unsent(each)]

    def _has_unsent(self, connection: Connection) -> bool:
        """Returns whether bytes for the client are in this process or in the kernel's send queue. Bytes that uvloop still has to
        encrypt for TLS are not seen."""
        kept = self._kept.get(connection)
        if kept is not None:
            return not _is_closed(kept) and _num_queued_bytes(kept.fileno()) > 0
        transport = connection.client
        if transport is None:
            return False
        return transport.get_write_buffer_size() > 0 or _num_queued_bytes(_descriptor(transport)) > 0

    def _give_up(self, connection: Connection) -> None:
        self._given_up.add(connection)
        if connection.client is not None:
            connection.client.abort()

    def _keep(self, connection: Connection) -> None:
        """Keeps the socket of a connection that is about to be closed open, if bytes are in its send queue, and sends the end of
        the stream after them. Connections with TLS are not kept, because uvloop has closed their sockets already."""
        transport = connection.client
        if transport is None or connection in self._given_up or transport.get_extra_info("sslcontext") is not None:
            return  # with TLS, uvloop has closed the socket already, and the number may be that of another one
        number = _descriptor(transport)
        if _num_queued_bytes(number) == 0:
            return
        try:
            kept = self._kept[connection] = socket.socket(fileno=os.dup(number))
            kept.shutdown(socket.SHUT_WR)
        except OSError as error:  # descriptors are short, or the connection was reset
            log.debug("the socket of a connection with unsent bytes is not kept: %s", error)


def _connections(server: ConnectionServer) -> list[Connection]:
    return [each for each in server.connections if isinstance(each, Connection)]


def _descriptor(transport: asyncio.Transport) -> int:
    """Returns the descriptor of a transport's socket; -1 if the transport has no socket, as for a background response, or the
    socket is closed."""
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())


def _num_queued_bytes(number: int) -> int:
    """Returns how many bytes of a socket the kernel still has to send, or the peer has not acknowledged yet. number: a descriptor;
    the result is 0 if it is closed or not a socket."""
    try:
        return int.from_bytes(fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)), "little")
    except (OSError, ValueError):
        return 0


def _is_closed(sock: socket.socket) -> bool:
    """Returns whether the TCP connection has ended on both sides, so that bytes in its send queue will never be sent."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
    except OSError:
        return True
