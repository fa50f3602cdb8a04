"""Passes a device's chunks between processes, as file descriptors over a Unix socket. Memory exists as long as any process holds
its descriptors, even if the process that allocated it has died.

An engine first sends only the shape of the memory that it is to have, without descriptors. If an earlier engine left memory of this
shape, the daemon answers with that memory's descriptors and a note on its content. Otherwise the engine allocates new memory and
sends the descriptors.

Source: unix(7), SCM_RIGHTS; CUDA driver API, cuMemExportToShareableHandle ("once all shareable handles are closed and the
allocation is released, the memory is released").
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

MAX_FDS = 253  # the kernel's limit for one message
OTHER_FILES = 512

_header = struct.Struct("<IIQI")  # descriptors, chunks, bytes of a chunk, bytes of the note


class Received(NamedTuple):
    """Memory that another process has sent by `send`. handles: the descriptors of the memory, which the receiver must close.
    num_chunks, chunk_bytes: the memory's shape. note: bytes that describe its content."""

    handles: list[int]
    num_chunks: int
    chunk_bytes: int
    note: bytes


def allow_many_files(num_files: int = 0) -> None:
    """Raises this process's limit of open files as far as the system allows, because each chunk of device memory may take a
    descriptor: 140 GiB in chunks of 16 MiB take 9,000. Raises OSError if the limit is then too low for num_files files besides the
    OTHER_FILES that a process may need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < num_files + OTHER_FILES:
        raise OSError(errno.EMFILE, f"{num_files} descriptors are more than a process may have here: {hard} files (ulimit -Hn)")


def send(sock: socket.socket, handles: Sequence[int], num_chunks: int, chunk_bytes: int, note: bytes = b"") -> None:
    """Sends descriptors, the shape of the memory that they stand for, and a note on its content. The descriptors stay open in this
    process. sock: a blocking stream socket. Raises OSError if sending fails."""
    sock.sendall(_header.pack(len(handles), num_chunks, chunk_bytes, len(note)) + note)
    for first in range(0, len(handles), MAX_FDS):
        socket.send_fds(sock, [b"h"], list(handles[first : first + MAX_FDS]))


def receive(sock: socket.socket) -> Received:
    """Waits until another process has sent descriptors by `send`, and returns them with the memory's shape and the note. Raises
    OSError if not all of them arrive; no descriptor is left open then."""
    count, num_chunks, chunk_bytes, note_bytes = _header.unpack(_exactly(sock, _header.size))
    note = _exactly(sock, note_bytes)
    handles: list[int] = []
    try:
        while len(handles) < count:
            data, fds, flags, _ = socket.recv_fds(sock, 1, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            handles += fds
            if not data or flags & socket.MSG_CTRUNC:
                why = "this process may open no more files" if data else "the sender is gone"
                raise ConnectionResetError(f"{len(handles)} of {count} handles came: {why}")
    except BaseException:
        close(handles)
        raise
    return Received(handles, num_chunks, chunk_bytes, note)


def close(handles: Sequence[int]) -> None:
    for fd in handles:
        os.close(fd)


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionResetError("no handles: the sender is gone")
        data += part
    return data
