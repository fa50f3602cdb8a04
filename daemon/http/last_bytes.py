"""Waits at a stop until the clients have received what was written for them.

The kernel goes on sending after a process has closed its sockets, but not if the network goes away with the process, as that of a
container does: the client then gets a reset in place of the rest. So the sockets stay open until their send queues are empty. The
queue of a TCP socket holds the bytes that the peer's kernel has not acknowledged yet.
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
    """The bytes that client connections of some servers have not delivered yet. From its creation on, this object keeps open the
    sockets of connections that the daemon closes while bytes are in their send queues; `end` closes them. runners: the runners of
    servers, which have been set up."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        servers = [runner.server for runner in runners]
        self._servers = [server for server in servers if isinstance(server, ConnectionServer)]
        self._seen: list[Connection] = []  # a server forgets its connections when it is cleaned up
        self._kept: dict[Connection, socket.socket] = {}  # duplicates of the sockets of closed connections
        self._given_up: set[Connection] = set()
        for server in self._servers:
            server.on_lost = self._keep

    async def wait(self, limit_s: float, hurry: asyncio.Event) -> int:
        """Waits until everything that is written now has been delivered or its client is gone, at most limit_s seconds and not
        beyond `hurry`. Returns the number of connections with bytes that were not delivered. These are given up: their buffers are
        dropped, so that no handler goes on waiting for the client, and later calls ignore them.

        A connection counts as delivered when its buffers are found empty NUM_EMPTY_LOOKS times in a row, because the bytes that
        uvloop holds beneath TLS cannot be seen. While there are any, the event loop fills the kernel's queue again between two
        looks. Connections without a byte anywhere are waited for no longer than two rounds of the event loop take."""
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
        """Returns whether bytes for the client are in this process or in the kernel's send queue. Bytes beneath TLS in uvloop are
        not seen."""
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
        """Keeps the socket of a connection that is about to be closed, if the client has not received everything. Sends the end of
        the stream after what is written, because the answer may be one that ends with the connection."""
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
    """Returns the descriptor of a transport's socket; -1 if it has none, as that of a background response, or none any more."""
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())


def _num_queued_bytes(number: int) -> int:
    """Returns how many bytes the kernel still has to send on a socket or to have acknowledged. number: a descriptor; one that is
    closed or no socket has no bytes."""
    try:
        return int.from_bytes(fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)), "little")
    except (OSError, ValueError):
        return 0


def _is_closed(sock: socket.socket) -> bool:
    """Returns whether the TCP connection has ended. What is left in its queue is never sent then."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
    except OSError:
        return True
