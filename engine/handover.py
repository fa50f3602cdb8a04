"""The engine's side of memory that outlives it: what an engine before it has left on the device, and what it leaves itself."""

from __future__ import annotations

import logging
import socket
import threading

from engine.memory import handles
from engine.memory.chunk_memory import ChunkMemory
from engine.protocol import WeightsHeld, decode_held

log = logging.getLogger("engine")


class Handover:
    """sock: to the daemon, which holds the descriptors of this device's memory while engines come and go."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def ask(self, num_chunks: int, chunk_bytes: int) -> tuple[list[int], list[WeightsHeld]]:
        """(descriptors of memory of that shape, for `close`; the weights that are in it); none and none where nothing was left."""
        handles.allow_many_files()
        try:
            handles.send(self._sock, [], num_chunks, chunk_bytes)
            given = handles.receive(self._sock)
        except OSError as error:
            log.warning("what the engine before has left is not taken over: %s", error)
            return [], []
        return given.handles, decode_held(given.note)

    def give(self, memory: ChunkMemory) -> None:
        """In the background: there may be thousands."""

        def work() -> None:
            exported: list[int] = []
            try:
                exported = memory.export()
                handles.send(self._sock, exported, memory.num_chunks, memory.chunk_bytes)
            except (OSError, RuntimeError) as error:
                log.warning("this engine's memory does not outlive it: %s", error)
            finally:
                handles.close(exported)

        threading.Thread(target=work, name="handover", daemon=True).start()
