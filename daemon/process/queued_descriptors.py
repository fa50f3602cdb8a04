"""Any number of descriptors as one: they are sent into a Unix socket that nobody reads, where they stay open as long as the socket
is. So thousands take one place in the service manager's FD store. Source: unix(7), SCM_RIGHTS."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from engine.memory import handles

QUEUE_LIMIT_S = 1.0  # a queue that takes no more descriptors never will


def queue_of(fds: Sequence[int], num_chunks: int = 0, chunk_bytes: int = 0) -> socket.socket:
    """Returns a socket that holds duplicates of the descriptors. num_chunks, chunk_bytes: the shape of the memory that they are, if
    they are memory. Raises OSError if they cannot be held."""
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
    """Returns what `queue_of` put into a socket. The caller owns the descriptors. queue: the socket's descriptor, which is closed.
    Raises OSError if not all of it is there."""
    with socket.socket(fileno=queue) as sock:
        sock.setblocking(False)  # all of it is there
        return handles.receive(sock)
