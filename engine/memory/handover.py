"""Passes device memory from one engine to the next, by way of the daemon: takes over the memory that an earlier engine left, and
sends the descriptors of this engine's own memory to the daemon."""

from __future__ import annotations

import logging
import socket

from engine.memory import handles
from engine.memory.chunk_memory import ChunkMemory
from engine.protocol import WeightsHeld, decode_held
from loader.threads import Thread

log = logging.getLogger("engine")

NOT_GIVEN = "this engine's memory does not outlive it: %s"


class Handover:
    """Exchanges descriptors of device memory with the daemon, which holds them while engines come and go. sock: the socket to the
    daemon."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def ask(self, num_chunks: int, chunk_bytes: int) -> tuple[list[int], list[WeightsHeld]]:
        """Asks the daemon for memory of this shape that an earlier engine left. Returns the memory's descriptors, which the caller
        closes with `handles.close`, and a description of the weights that are in it. Both are empty if nothing was left, or if it
        could not be received, which is logged."""
        handles.allow_many_files()
        try:
            handles.send(self._sock, [], num_chunks, chunk_bytes)
            given = handles.receive(self._sock)
        except OSError as error:
            log.warning("what the engine before has left is not taken over: %s", error)
            return [], []
        return given.handles, decode_held(given.note)

    def give(self, memory: ChunkMemory) -> None:
        """Sends the descriptors of this engine's memory to the daemon, so that the memory outlives this process. A background
        thread sends them, because there may be thousands. An error is only logged; the memory then ends with this process."""

        def work() -> None:
            exported: list[int] = []
            try:
                exported = memory.export()
                handles.send(self._sock, exported, memory.num_chunks, memory.chunk_bytes)
            except (OSError, RuntimeError) as error:
                log.warning(NOT_GIVEN, error)
            finally:
                handles.close(exported)

        try:
            Thread(target=work, name="handover").start()
        except MemoryError as error:
            log.warning(NOT_GIVEN, error)
