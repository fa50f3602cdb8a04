"""The TCP connection between a proxy (in an engine's place on the daemon's host) and a lender (which runs the engine on another
host): both prove that they know the same key, then they send frames.

The proof is that of multiprocessing.connection: a challenge in each direction, answered by its HMAC with the key. Nothing is
encrypted, so the connection belongs in a network that others cannot read or write. A frame is its length (uint32, little-endian)
and a msgpack body."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import msgspec

from engine.remote.frames import Frame

CONNECT_S = 10.0  # limit for connecting, and for each part of the proof
SILENT_S = 10  # a host that acknowledges nothing for so long counts as failed
LEAST_KEY_BYTES = 16
_SMALL_BYTES = 16 << 10
_length = struct.Struct("<I")


class WireClosed(Exception):
    """Raised when the connection to the other host has ended; the text says why."""


class Wire:
    """One end of a connection between hosts. sock: the connected socket, which this object owns from now on. receives: the union of
    the types of frames that arrive here. One thread may receive while others send."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        _prepare(sock)
        self._sock = sock
        self._decoder, self._encoder = msgspec.msgpack.Decoder(receives), msgspec.msgpack.Encoder()
        self._sending = threading.Lock()
        self._head, self._received = bytearray(_length.size), bytearray(1 << 16)  # the latter grows with the frames
        self._silence_s = 0.0

    def prove(self, key: bytes, asks_first: bool) -> None:
        """Proves to the other end that this end knows the key, and makes the other end prove the same. asks_first: whether this end
        sends the first challenge; True on the lender's end. Raises WireClosed if the keys differ or the other end does not
        answer."""
        try:
            _limit_waits(self._sock, CONNECT_S)
            with Connection(os.dup(self._sock.fileno())) as connection:
                for ask in (asks_first, not asks_first):
                    (deliver_challenge if ask else answer_challenge)(connection, key)
            _limit_waits(self._sock, 0.0)
        except AuthenticationError:
            raise WireClosed("the keys differ") from None
        except (OSError, EOFError) as error:
            raise WireClosed(f"the other end did not prove that it knows the key: {_text(error)}") from None

    def limit_silence(self, seconds: float) -> None:
        """Sets the limit, in seconds, after which `receive` raises WireClosed if nothing has arrived."""
        if seconds != self._silence_s:
            self._silence_s = seconds
            _limit_waits(self._sock, seconds, (socket.SO_RCVTIMEO,))

    def send(self, frame: Frame) -> None:
        """Sends a frame; blocks while the network takes no more. Raises WireClosed if the connection has ended."""
        data = self._encoder.encode(frame)
        head = _length.pack(len(data))
        try:
            with self._sending:
                if len(data) < _SMALL_BYTES:
                    self._sock.sendall(head + data)
                else:  # the other end wakes with the length, and waits no longer when the rest arrives
                    self._sock.sendall(head)
                    self._sock.sendall(data)
        except OSError as error:
            raise WireClosed(_text(error)) from None

    def receive(self) -> Any:
        """Waits for the next frame and returns it. A memoryview in the frame is valid until the next call. Raises WireClosed if the
        connection has ended, nothing has arrived within the limit (limit_silence), or what arrived is no frame."""
        try:
            self._fill(memoryview(self._head))
            (num_bytes,) = _length.unpack(self._head)
            if num_bytes > len(self._received):
                self._received = bytearray(num_bytes)
            body = memoryview(self._received)[:num_bytes]
            self._fill(body)
            return self._decoder.decode(body)
        except BlockingIOError:
            raise WireClosed(f"nothing has come for {self._silence_s:g} s") from None
        except (OSError, EOFError) as error:
            raise WireClosed(_text(error)) from None
        except msgspec.MsgspecError as error:
            raise WireClosed(f"what came is no frame: {error}") from None

    def _fill(self, memory: memoryview) -> None:
        """Fills `memory` with the next bytes that arrive on the connection. Raises EOFError at the end of the stream."""
        while memory:
            if not (num := self._sock.recv_into(memory)):
                raise EOFError
            memory = memory[num:]

    def shut(self) -> None:
        """Ends the connection, so that both ends' `receive` and `send` raise WireClosed. Any thread may call it, and more than
        once."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection and closes it. Called when no other thread uses it any more."""
        self.shut()
        self._sock.close()


def connect(host: str, port: int, key: bytes, receives: Any) -> Wire:
    """Connects to a lender, and returns the connection after both ends have proved that they know the key. Raises WireClosed if
    that fails. receives: the union of the types of frames that the lender sends."""
    try:
        wire = Wire(socket.create_connection((host, port), CONNECT_S), receives)
    except OSError as error:
        raise WireClosed(_text(error)) from None
    try:
        wire.prove(key, asks_first=False)
    except WireClosed:
        wire.close()
        raise
    return wire


def read_key(path: str) -> bytes:
    """Returns the key in a file: its first line without spaces around it. Raises ValueError, which names the file, for an
    unreadable file or a key that is too short."""
    try:
        with open(path, "rb") as file:
            key = file.readline(4096).strip()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if len(key) < LEAST_KEY_BYTES:
        raise ValueError(f"{path}: its first line must be a key of {LEAST_KEY_BYTES} characters or more")
    return key


def _prepare(sock: socket.socket) -> None:
    """Sets the socket's options: data is sent at once, and the connection ends when the other host acknowledges nothing for
    SILENT_S seconds."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = max(1, SILENT_S // 4)
    for option, value in (
        (socket.TCP_KEEPIDLE, every_s),
        (socket.TCP_KEEPINTVL, every_s),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _limit_waits(sock: socket.socket, seconds: float, options: tuple[int, ...] = (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)) -> None:
    """Limits the time of each read and write of the socket, in seconds; 0.0: no limit. options: SO_RCVTIMEO to limit reads,
    SO_SNDTIMEO to limit writes."""
    for option in options:
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


def _text(error: BaseException) -> str:
    if isinstance(error, BlockingIOError):
        return "it did not answer in time"
    return "the other end closed the connection" if isinstance(error, EOFError) else str(getattr(error, "strerror", "") or error)
