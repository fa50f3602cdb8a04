"""A connection for a request that no client waits for: the request's bytes are read as if a client had sent them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from daemon.http.connection import ConnectionServer
from daemon.streams.so_far import ConnectionSoFar, RequestSoFar

_OWNER = "owner"  # key of the transport's extra info that holds the request's owner


class NoClient(asyncio.Transport):
    """A transport for a request that no client waits for: it drops all bytes that are written to it. owner: the object to which the
    request belongs; see owner_of(). closed: called when the connection ends."""

    def __init__(self, owner: object, closed: Callable[[], None]) -> None:
        super().__init__({_OWNER: owner})
        self._closed = closed
        self._protocol: asyncio.BaseProtocol | None = None

    def serve(self, server: ConnectionServer, received: bytes, request: RequestSoFar) -> None:
        """Makes the server handle a request as if it had arrived on this connection. received: the request's bytes, with a header
        that ends the connection after the request. request: the state from which it is continued."""
        self._protocol = server.connection(self._closed, ConnectionSoFar(received, True, request))
        self._protocol.connection_made(self)

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def is_closing(self) -> bool:
        return self._protocol is None

    def close(self) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            asyncio.get_running_loop().call_soon(protocol.connection_lost, None)

    abort = close

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def owner_of(transport: asyncio.BaseTransport | None) -> Any:
    """Returns the owner of the request that arrives on `transport` if that is a NoClient; None for a client's transport, and for
    None."""
    return transport.get_extra_info(_OWNER) if transport is not None else None
