"""A device's chunks as file descriptors: whoever holds them holds the memory, whatever becomes of the process that made it. They
cross between processes over a Unix socket.

Source: unix(7), SCM_RIGHTS; CUDA driver API, cuMemExportToShareableHandle ("once all shareable handles are closed and the
allocation is released, the memory is released").
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

MAX_FDS = 253  # the kernel's limit for one message

_header = struct.Struct("<IIQ")  # descriptors, chunks, bytes of a chunk


def send(sock: socket.socket, handles: Sequence[int], num_chunks: int, chunk_bytes: int) -> None:
    """The descriptors stay the caller's, too. sock: a blocking stream socket. Raises OSError."""
    sock.sendall(_header.pack(len(handles), num_chunks, chunk_bytes))
    for first in range(0, len(handles), MAX_FDS):
        socket.send_fds(sock, [b"h"], list(handles[first : first + MAX_FDS]))


def receive(sock: socket.socket) -> tuple[list[int], int, int]:
    """(descriptors, which the caller closes; chunks; bytes of a chunk), as another process sent them. Raises OSError if it ended
    before the last one; none is left open then."""
    head = b""
    while len(head) < _header.size:
        part = sock.recv(_header.size - len(head))
        if not part:
            raise ConnectionResetError("no handles: the sender is gone")
        head += part
    count, num_chunks, chunk_bytes = _header.unpack(head)
    handles: list[int] = []
    try:
        while len(handles) < count:
            data, fds, flags, _ = socket.recv_fds(sock, 1, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            handles += fds
            if not data or flags & socket.MSG_CTRUNC:
                why = "this process may open no more files" if data else "the sender is gone"
                raise ConnectionResetError(f"{len(handles)} of {count} handles came: {why}")
    except BaseException:
        for fd in handles:
            os.close(fd)
        raise
    return handles, num_chunks, chunk_bytes
