"""Packs any number of descriptors into one: they are sent into a Unix socket that nobody reads, and stay open as long as the
socket. So thousands of them take one entry of the service manager's FD store. Source: unix(7), SCM_RIGHTS."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from engine.memory import handles

QUEUE_LIMIT_S = 1.0  # if the queue takes no descriptor in this time, it never will


def queue_of(fds: Sequence[int], num_chunks: int = 0, chunk_bytes: int = 0) -> socket.socket:
    """Returns a socket in which duplicates of the descriptors are queued; they stay open as long as it does. num_chunks,
    chunk_bytes: the number and size of the memory's chunks, if the descriptors are a device's memory. Raises OSError if the socket
    cannot hold them."""
    queue, ours = socket.socketpair()
    with ours:
        ours.settimeout(QUEUE_LIMIT_S)
        try:
            handles.send(ours, fds, num_chunks, chunk_bytes)
        except OSError:
            queue.close()
            raise
    return queue


def unqueue(queue: int) -> handles.Received:
    """Returns all descriptors that are queued in a socket by `queue_of`; the caller owns them. queue: the socket's descriptor,
    which this call closes. Raises OSError if some of the queued descriptors are missing."""
    with socket.socket(fileno=queue) as sock:
        sock.setblocking(False)  # everything has arrived already
        return handles.receive(sock)
