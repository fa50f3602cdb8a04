"""The connection of a request that no client waits for: the request's bytes are read as if one had sent them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from daemon.http.connection import ConnectionServer
from daemon.streams.so_far import ConnectionSoFar, RequestSoFar

_OWNER = "owner"  # the name under which the transport tells whose request it is


class NoClient(asyncio.Transport):
    """A transport that drops what is written to it. owner: whose request it is, see owner_of(). closed: called at its end."""

    def __init__(self, owner: object, closed: Callable[[], None]) -> None:
        super().__init__({_OWNER: owner})
        self._closed = closed
        self._protocol: asyncio.BaseProtocol | None = None

    def serve(self, server: ConnectionServer, received: bytes, request: RequestSoFar) -> None:
        """Has the server answer a request. received: its bytes, which end the connection after it. request: what is known of it."""
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
    """Returns the owner of a transport that is a NoClient, or None if a client is there, or was."""
    return transport.get_extra_info(_OWNER) if transport is not None else None
