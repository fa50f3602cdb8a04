"""Writes an engine's standard error to the daemon's log, line by line.

The pipe is read with a reader of the event loop. uvloop's own transport for pipes closes the descriptor twice: between the two, a
thread may be given the same number for another file, which the second close would then close.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import IO

from daemon.process.logs import fields

log = logging.getLogger("hearthd.engine")
READ_BYTES = 64 << 10
LAST_BYTES = 1 << 20  # the most that is read when the engine has ended; another process may still write to the pipe
LINE_BYTES = 64 << 10  # a longer line is logged in parts
LEVELS = {"INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR, "CRITICAL": logging.CRITICAL}


class EngineStderr:
    """Logs the lines that one engine process writes to its standard error. Must be made on the event loop, and begins to read at
    once. A line that begins with the name of a level is logged at that level, any other one as information. stream: the read end of
    the pipe with the process's standard error, which this object closes. device: the engine's device."""

    def __init__(self, stream: IO[bytes], device: str) -> None:
        self._loop, self._stream, self._device = asyncio.get_running_loop(), stream, device
        self._rest = b""  # the beginning of a line whose end has not been read yet
        os.set_blocking(stream.fileno(), False)
        self._loop.add_reader(stream.fileno(), self._read)

    def close(self) -> None:
        """Logs what the pipe still holds, and closes it. Called when the process has ended. Further calls do nothing."""
        num_bytes = 0
        while not self._stream.closed and num_bytes < LAST_BYTES and (num_read := self._read()):
            num_bytes += num_read
        self._end()

    def _read(self) -> int:
        """Reads once and logs the lines. Returns the number of bytes read, and 0 if there are none now or never again."""
        try:
            data = os.read(self._stream.fileno(), READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._end()
            return 0
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._log(line)
        if len(self._rest) > LINE_BYTES:
            self._log(self._rest)
            self._rest = b""
        return len(data)

    def _end(self) -> None:
        if self._stream.closed:
            return
        self._loop.remove_reader(self._stream.fileno())
        self._stream.close()
        if self._rest:
            self._log(self._rest)

    def _log(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        level, _, rest = text.partition(" ")
        if level in LEVELS:
            log.log(LEVELS[level], "%s", rest, extra=fields(device=self._device))
        elif text:
            log.info("%s", text, extra=fields(device=self._device))
