"""Serves an HTTP application on its listeners, each of which has a share of the file descriptors."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from daemon.errors import HearthError
from daemon.http.acceptor import Acceptor, Bounds, Crowd, Protocols, Refusal, TlsContext
from daemon.http.answers import refusal
from daemon.http.connection import ConnectionServer, Runner
from daemon.http.request_id import request_id
from daemon.process.shortage import overloaded


async def listen(
    runner: Runner,
    listeners: Sequence[socket.socket],
    backlog: int,
    bounds: Bounds,
    refuse: Protocols,
    crowd: Crowd | None = None,
    tls: TlsContext = lambda: None,
) -> list[Acceptor]:
    """Starts to accept connections on the listeners, and returns an Acceptor for each of them. backlog: the most connections that
    may wait in the kernel for each listener. bounds: the descriptor numbers from which connections are refused. refuse: the result
    of `refuse_request`. crowd: the limit on one client's connections; None: no limit. tls: returns the TLS settings for a new
    connection, or None."""
    await runner.setup()
    server = runner.server
    assert isinstance(server, ConnectionServer)
    acceptors = [Acceptor(listener, server.connection, refuse, bounds, crowd, tls) for listener in listeners]
    for acceptor in acceptors:
        acceptor.start(backlog)
    return acceptors


def refuse_request(answered: Callable[[str, int], None], error_of: Callable[[], HearthError] = overloaded) -> Protocols:
    """Returns a factory of protocols, each of which answers one connection with an error in OpenAI's form. answered: called with an
    endpoint's name (always "") and the status, to count the answer. error_of: makes the error."""

    def refuse(closed: Callable[[], None]) -> Refusal:
        error = error_of()
        answered("", error.status)
        return Refusal(refusal(error, error.body(), request_id(None)), closed)

    return refuse
