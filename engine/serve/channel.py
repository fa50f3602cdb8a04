"""The engine's end of a socketpair that leads to the daemon or to a grammar process: sends and receives framed messages. Only
functions named wait_… block."""

from __future__ import annotations

import select
import socket
from typing import Any

from engine.protocol import FrameReader, Message, ToEngine, encode

RECV_BYTES = 1 << 18


def wait_until(sock: socket.socket | int, events: int, limit_s: float | None = None) -> bool:
    """Blocks until a poll reports one of `events` (select.POLLIN, select.POLLOUT) or the end of the stream, and returns True.
    Returns False if limit_s seconds pass first; None: no limit. sock: a socket or its descriptor. Uses poll instead of select(2),
    which refuses high descriptor numbers: engines have such numbers if the daemon that starts them holds a device's memory in
    thousands of descriptors."""
    poller = select.poll()
    poller.register(sock, events)
    return bool(poller.poll(None if limit_s is None else limit_s * 1e3))


class ChannelClosed(Exception):
    """Raised when the process at the other end of a channel has closed it."""


class Channel:
    """The engine's end of a channel. A message goes to the kernel at once; bytes that the kernel does not take are kept in a
    backlog, whose size is `backlog_bytes`. kinds: the type, or union of types, of the messages that come from the other end; by
    default the daemon's."""

    def __init__(self, sock: socket.socket, kinds: Any = ToEngine) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._reader = FrameReader(kinds)
        self._out = bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def backlog_bytes(self) -> int:
        return len(self._out)

    def send(self, message: Message) -> None:
        """Sends a message, and adds the bytes that the kernel does not take to the backlog. Raises ChannelClosed if the other end
        is closed."""
        frame = encode(message)
        if self._out:
            self._out += frame
            self.flush()
            return
        sent = self._send(frame)
        if sent < len(frame):
            self._out += frame[sent:]

    def flush(self) -> None:
        """Hands as much of the backlog to the kernel as it takes, at most 1 MiB in one call. Raises ChannelClosed if the other end
        is closed."""
        if self._out:
            del self._out[: self._send(bytes(memoryview(self._out)[: 1 << 20]))]

    def receive(self) -> list[Any]:
        """Returns all messages that have arrived, without blocking. Raises ChannelClosed at the end of the stream, after the last
        message was returned."""
        messages: list[Any] = []
        while True:
            try:
                data = self._sock.recv(RECV_BYTES)
            except BlockingIOError:
                return messages
            except ConnectionError:
                data = b""
            if not data:
                if messages:
                    return messages
                raise ChannelClosed
            messages.extend(self._reader.feed(data))
            if len(data) < RECV_BYTES:
                return messages

    def wait_for_room(self, limit_s: float) -> None:
        """Blocks until the kernel takes more data, at most limit_s seconds."""
        wait_until(self._sock, select.POLLOUT, limit_s)

    def wait_for_message(self) -> list[Any]:
        """Blocks until at least one message has arrived, and returns all messages that have arrived. Raises ChannelClosed if the
        other end is closed."""
        while True:
            wait_until(self._sock, select.POLLIN)
            messages = self.receive()
            if messages:
                return messages

    def _send(self, data: bytes) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except ConnectionError as error:
            raise ChannelClosed from error
