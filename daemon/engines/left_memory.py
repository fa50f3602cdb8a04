"""One device's memory between the lives of its engines, so that weights need not be loaded again.

The daemon holds the descriptors of the memory and the engine's account of which weights are where. Both go to the next engine,
which maps the weights where they are and uses them if they sum up to what they did before. What the daemon has told an engine to
load or to evict is not in the account from that moment on, so nothing half written is ever offered. All else in the memory, KV too,
is the next engine's to use anew.

While the daemon holds them, the memory stays allocated: a device's driver counts it against the device, without a process to show
for it. So it is let go wherever a new engine might not want it: see `ended`.
"""

from __future__ import annotations

import logging
import socket

from daemon.process.logs import fields
from engine import protocol
from engine.memory import handles

log = logging.getLogger("hearthd.engine")

EARLY_S, MAX_EARLY = 60.0, 2  # a request that kills its engine does so twice at most (max_crashes), of which the first counts not


class LeftMemory:
    """Of one device. `exchange` runs in a thread of its own while an engine lives, the rest where no exchange runs or on the event
    loop. is_host: the memory is the system's, so that holding it keeps it from everybody."""

    def __init__(self, device: str, is_host: bool) -> None:
        self._device, self._is_host = device, is_host
        self._handles: list[int] = []
        self._shape = (0, 0)  # chunks, bytes of a chunk
        self._weights: dict[str, protocol.WeightsHeld] = {}
        self._placed: dict[str, int] = {}  # model -> the load whose weights may be there
        self._adopted = False  # by the engine that lives
        self._num_early = 0  # engines in a row that had adopted it and died early

    @property
    def models(self) -> list[str]:
        """Whose weights the next engine would find."""
        return list(self._weights) if self._handles else []

    def exchange(self, sock: socket.socket) -> None:
        """Answers one engine's question, and takes the descriptors of the memory it makes, if it makes any. Returns at its death at
        the latest."""
        with sock:
            try:
                handles.allow_many_files()
                wanted = handles.receive(sock)
                shape = (wanted.num_chunks, wanted.chunk_bytes)
                if shape != self._shape or not self.models:
                    self.let_go("" if not self._handles else f"the next engine wants {shape[0]} chunks of {shape[1]} bytes")
                self._adopted = bool(self._handles)
                note = protocol.encode_held(list(self._weights.values())) if self._handles else b""
                handles.send(sock, self._handles, *shape, note)
                if not self._handles:
                    received = handles.receive(sock)
                    self._handles, self._shape = received.handles, (received.num_chunks, received.chunk_bytes)
            except OSError as error:
                log.debug("no memory is held for %s: %s", self._device, error)

    def sent(self, message: protocol.Message) -> None:
        """What the engine is told."""
        if isinstance(message, protocol.LoadModel):
            self._placed[message.model] = message.placement_id
            self._weights.pop(message.model, None)
        elif isinstance(message, protocol.EvictModel):
            self._placed.pop(message.model, None)
            self._weights.pop(message.model, None)

    def told(self, held: protocol.WeightsHeld) -> None:
        """What the engine says; of a model that was told to leave meanwhile it is void. What an engine before had left in these
        chunks is not there any more."""
        if self._placed.get(held.model) == held.placement_id:
            chunks = set(held.chunks)
            self._weights = {name: other for name, other in self._weights.items() if chunks.isdisjoint(other.chunks)}
            self._weights[held.model] = held

    def ended(self, came_up: bool, lasted_s: float, distrusted: bool, kernel_killed: bool) -> None:
        """An engine's life. The memory is let go where the next engine might fail by it as this one did (it did not come up, or is
        not the first on it to die early), where the device itself is at fault (distrusted), and where the system ended the engine
        for want of memory that this is."""
        self._placed.clear()
        self._num_early = self._num_early + 1 if self._adopted and lasted_s < EARLY_S else 0
        if distrusted:
            self.let_go("the device had a fault")
        elif kernel_killed and self._is_host:
            self.let_go("the system is short of memory")
        elif not came_up:
            self.let_go("the engine on it did not come up")
        elif self._num_early >= MAX_EARLY:
            self.let_go(f"{self._num_early} engines that had taken them over died early")
        elif not self.models:
            self.let_go("")
        else:
            num_bytes = sum(weights.num_bytes for weights in self._weights.values())
            text = "%.2f GiB of weights stay on the device for the next engine: %s"
            log.info(text, num_bytes / 2**30, ", ".join(self.models), extra=fields(device=self._device))

    def let_go(self, why: str) -> None:
        """Gives the memory back, with what is in it. why: for the log; "" where nothing is lost."""
        if why and self.models:
            log.warning("weights on the device are given up: %s", why, extra=fields(device=self._device))
        handles.close(self._handles)
        self._handles, self._weights, self._num_early = [], {}, 0
