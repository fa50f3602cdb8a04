"""Exchanges descriptors of device memory between the ranks of a split model, which are processes of one host, over Unix sockets.

A rank listens under a name that is made from an id that only the ranks know. It is an abstract socket name (unix(7)), not a file,
so a rank that dies leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct

from engine.memory import handles

SWAP_LIMIT_S = 10.0  # for each of the others; all ranks swap at the same time

_credentials = struct.Struct("<iII")  # process, user, group


class PeerHandles:
    """One rank's side of the exchange of memory descriptors between the ranks (devices) of a split model. It listens for the other
    ranks as soon as the object exists. group_id: an id that is the same on all ranks, and known only to them. size: number of
    ranks. Raises OSError if it cannot listen."""

    def __init__(self, group_id: bytes, rank: int, size: int) -> None:
        digest = hashlib.blake2b(group_id, digest_size=24).hexdigest()
        self._rank, self._names = rank, [f"\0hearthd-peers-{digest}-{number}" for number in range(size)]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(self._names[rank])
            self._socket.listen(size)
        except BaseException:
            self._socket.close()
            raise

    def swap(self, handle: int, num_bytes: int) -> dict[int, int]:
        """Sends a descriptor of num_bytes bytes of memory to every other rank. Returns the other ranks' descriptors by rank, which
        the caller must close. All ranks must listen already, and their memory must have the same size. Raises OSError if a rank
        does not take or send its descriptor in time, or sends a wrong one."""
        others = [rank for rank in range(len(self._names)) if rank != self._rank]
        found: dict[int, int] = {}
        try:
            for rank in others:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to:
                    to.settimeout(SWAP_LIMIT_S)
                    to.connect(self._names[rank])
                    handles.send(to, [handle], 1, num_bytes, bytes([self._rank]))  # stays in the socket until it is taken
            self._socket.settimeout(SWAP_LIMIT_S)
            while len(found) < len(others):
                sender, _ = self._socket.accept()
                with sender:
                    sender.settimeout(SWAP_LIMIT_S)
                    rank, given = _taken(sender, num_bytes)
                if rank not in others or rank in found:
                    os.close(given)
                    raise ConnectionError(f"a descriptor from rank {rank}, which none was expected from")
                found[rank] = given
        except BaseException:
            handles.close(list(found.values()))
            raise
        return found

    def close(self) -> None:
        self._socket.close()


def _taken(sender: socket.socket, num_bytes: int) -> tuple[int, int]:
    """Receives the descriptor of num_bytes bytes of memory from another rank. Returns that rank's number and the descriptor. Raises
    OSError if the sender is a process of another user, or sends anything else."""
    _, user, _ = _credentials.unpack(sender.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size))
    if user != os.geteuid():
        raise ConnectionError(f"a descriptor from user {user}, who is another one")
    told = handles.receive(sender)
    if len(told.handles) != 1 or len(told.note) != 1 or told.chunk_bytes != num_bytes:
        handles.close(told.handles)
        raise ConnectionError(f"{len(told.handles)} descriptors of {told.chunk_bytes} bytes instead of one of {num_bytes}")
    return told.note[0], told.handles[0]
