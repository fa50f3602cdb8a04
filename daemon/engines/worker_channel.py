"""The daemon's end of the socketpair to one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from engine import protocol


class WorkerChannel(asyncio.Protocol):
    """The daemon's connection to one engine: decodes each message from the engine and passes it to `on_message`, on the event loop.
    on_broken: called with the error if the engine's bytes cannot be decoded as messages. `closed`: a future that is set at the end
    of the stream, after the last message, so no message of a dead engine can arrive after its death was handled."""

    def __init__(self, on_message: Callable[[Any], None], on_broken: Callable[[Exception], None]) -> None:
        self._frames = protocol.FrameReader(protocol.FromEngine)
        self._on_message, self._on_broken = on_message, on_broken
        self._transport: asyncio.WriteTransport | None = None
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._frames.feed(data)
        except Exception as error:  # the bytes do not follow the protocol, so the engine cannot be trusted any more
            self._on_broken(error)
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, message: protocol.Message) -> None:
        """Sends a message without blocking. A message to an engine that has ended is dropped, because the scheduler hears of that
        death anyway."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(protocol.encode(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
