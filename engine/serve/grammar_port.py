"""The engine's end of one model's grammar process: starts and ends the process, exchanges messages with it, and holds the memory to
which the process writes masks (the tokens that requests may sample next)."""

from __future__ import annotations

import mmap
import os
import select
import socket
import subprocess
import sys

import numpy as np
import numpy.typing as npt

from engine.contracts.loads import LocksMasks
from engine.grammar.messages import FromGrammar, row_bytes
from engine.host.child_process import child_environment
from engine.protocol import LoadModel, Message
from engine.serve.channel import Channel, ChannelClosed, wait_until

# Rows whose masks are page-locked. A step has no more than 64 masks copied from there, and rows are given out lowest first. The
# memory is there at once, at most 8 MiB with a vocabulary of 262,144.
MOST_LOCKED = 256


class ProcessDied(Exception):
    """Raised when a model's grammar process has ended. The caller closes the GrammarPort and makes a new one."""


class GrammarPort:
    """A running grammar process of one model.
    masks [num_rows, rows_each, W] uint32: masks of W words, written by the process. Each request has one row, whose mask n is for
    the token after n drafted tokens (engine/grammar/messages.py, Open). Readable after the process's death.
    locks: page-locks masks until `close`; None: masks are not page-locked.
    locked: mask 0 of the first rows, MOST_LOCKED at most, page-locked; None: no mask is.
    Raises OSError or MemoryError if the process cannot be started."""

    def __init__(self, vocab_size: int, num_rows: int, rows_each: int = 1, locks: LocksMasks | None = None) -> None:
        num_bytes = num_rows * rows_each * row_bytes(vocab_size)
        fd = os.memfd_create("grammar masks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
            memory = mmap.mmap(fd, num_bytes)
            behind_drafts = np.frombuffer(memory, np.uint32).reshape(rows_each, num_rows, -1)
            self.masks: npt.NDArray[np.uint32] = behind_drafts.swapaxes(0, 1)
            self._socket, self._process = _spawn(fd)
        finally:
            os.close(fd)
        self._channel = Channel(self._socket, FromGrammar)
        self._locks = locks
        self.locked = None if locks is None else locks.lock_masks(behind_drafts[0, :MOST_LOCKED])

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        """Sends a message without blocking. Bytes that the kernel does not take, because the process does not read, wait in the
        backlog for `flush`. Raises ProcessDied if the process has ended."""
        try:
            self._channel.send(message)
        except ChannelClosed as closed:
            raise self._died() from closed

    @property
    def backlog_bytes(self) -> int:
        return self._channel.backlog_bytes

    def flush(self) -> None:
        """Hands as much of the backlog to the kernel as it takes. Raises ProcessDied if the process has ended."""
        try:
            self._channel.flush()
        except ChannelClosed as closed:
            raise self._died() from closed

    def wait(self, seconds: float) -> bool:
        """Waits for a message of the grammar process, for at most `seconds`, and returns whether one can be received."""
        return wait_until(self._socket, select.POLLIN, seconds)

    def receive(self) -> list[object]:
        """Returns the messages that have arrived, without blocking. Raises ProcessDied if the process has ended."""
        try:
            return self._channel.receive()
        except ChannelClosed as closed:
            raise self._died() from closed

    def _died(self) -> ProcessDied:
        return ProcessDied(f"process {self._process.pid} ended")

    def close(self) -> None:
        """Kills the process, even in the middle of its work, and ends the page-locking of the masks. The masks' memory is unmapped
        once nothing reads it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        if self.locked is not None and self._locks is not None:
            self._locks.unlock_masks(self.locked)


def _spawn(masks_fd: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        fds = (theirs.fileno(), masks_fd)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.grammar", "--channel-fd", str(fds[0]), "--masks-fd", str(fds[1])],
                cwd="/",
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
            )
        except BaseException:
            ours.close()
            raise
    return ours, process


def folder_of(spec: LoadModel) -> str:
    return os.path.abspath(spec.path)
