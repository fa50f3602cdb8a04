"""Hands the open connections over to the next daemon at a restart, and continues those that an earlier daemon has handed over.

The old daemon stops taking tokens from its engines and writes what its clients have yet to get. For each connection it records the
request in progress and the output so far (daemon/streams/so_far.py), and it gives the sockets to the FD store. Background responses
have no connection to hand over (daemon/api/background.py). The next daemon reads each request again. The request's sequences begin
with the output so far, which is not sent to the client again and whose KV the engine computes anew.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial

from daemon.http import handed_over
from daemon.http.client_addresses import ClientAddresses
from daemon.http.connection import Connection, ConnectionServer, Runner
from daemon.http.handed_over import Left, Listed
from daemon.http.no_client import owner_of
from daemon.node.node import NodeParts
from daemon.process.fd_store import FdStore

log = logging.getLogger("hearthd")
FLUSH_S = 2.0  # how long a client may take to read what is written already; after that it is not waited for
LOOK_EVERY_S = 0.01


async def hand_over(node: NodeParts, store: FdStore, servers: Mapping[str, Runner]) -> None:
    """Hands over all client connections that can be continued to the next daemon: puts their sockets and states into the store, and
    ends them here. The other connections stay with this daemon. servers: the HTTP servers by the names of their listeners ("main",
    "admin"). Failures are logged."""
    node.engine_events.is_over = True
    node.background.hold()
    connections = [(name, each) for name, server in servers.items() for each in _connections(server)]
    for _, connection in connections:
        connection.hold_reading()
    await asyncio.sleep(0)
    await _until(lambda: not any(each.is_beginning for _, each in connections))  # heads that have arrived become requests
    for _, connection in connections:
        if connection.in_progress is not None:
            connection.in_progress.write_all()
    await asyncio.sleep(0)
    await _until(lambda: not any(each.has_unsent for _, each in connections))
    left: list[tuple[Connection, Listed]] = []
    for name, connection in connections:
        try:
            so_far = connection.so_far()
        except Exception:  # the other connections are still handed over
            log.exception("a connection cannot be handed over")
            continue
        if so_far is not None:
            left.append((connection, Listed(name, so_far)))
    try:
        handed_over.keep(store, [connection.descriptor for connection, _ in left], [listed for _, listed in left])
    except OSError as error:
        log.error("connections cannot be handed over to the next hearthd, and are closed: %s", error)
    else:
        num_requests = sum(listed.connection.request is not None for _, listed in left)
        log.info("%d connections are handed over to the next hearthd, %d of them with a request", len(left), num_requests)
        for connection, _ in left:
            connection.let_go()
        await _until(lambda: all(connection.transport is None for connection, _ in left))  # so that no handler writes an error


async def _until(condition: Callable[[], bool]) -> None:
    """Waits until `condition` returns True, but no longer than FLUSH_S seconds."""
    for _ in range(int(FLUSH_S / LOOK_EVERY_S)):
        if condition():
            return
        await asyncio.sleep(LOOK_EVERY_S)


def _connections(runner: Runner) -> list[Connection]:
    """Returns the server's connections to clients, without those of background responses, which have no client."""
    server = runner.server
    found = [each for each in server.connections if isinstance(each, Connection)] if server is not None else []
    return [each for each in found if owner_of(each.transport) is None]


async def go_on(node: NodeParts, left: Left, servers: Mapping[str, tuple[Runner, ClientAddresses | None]]) -> None:
    """Continues the connections and background responses that an earlier daemon has left. left: their sockets and states. servers:
    for each listener's name its HTTP server, and the counter of each client's connections (None: they are not counted)."""
    main = servers["main"][0].server
    assert isinstance(main, ConnectionServer)
    if num_runs := node.background.go_on(main):
        log.info("%d responses in the background of before the restart go on", num_runs)
    if not left:
        return
    num_served = 0
    for sock, listed in left:
        runner, addresses = servers.get(listed.listener, (None, None))
        server = runner.server if runner is not None else None
        if not isinstance(server, ConnectionServer):
            sock.close()  # the settings no longer have this listener
            continue
        num_served += await _serve(server, sock, listed, addresses)
    log.info("%d of %d connections of before the restart go on", num_served, len(left))


async def _serve(server: ConnectionServer, sock: socket.socket, listed: Listed, addresses: ClientAddresses | None) -> bool:
    closed: Callable[[], None] = _nothing
    try:
        if addresses is not None and sock.family != socket.AF_UNIX:
            closed = addresses.enter(sock.getpeername()[0]).leave  # whatever the limit is now: the connection was within it before
        make = partial(server.connection, closed, listed.connection)
        await asyncio.get_running_loop().connect_accepted_socket(make, sock)
    except OSError as error:  # its client has closed the connection
        log.debug("a connection of before the restart has ended: %s", error)
        sock.close()
        closed()
        return False
    return True


def _nothing() -> None:
    pass
