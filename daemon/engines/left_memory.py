"""Keeps one device's memory when its engine ends, so that the next engine need not load the weights again. With a service manager
the memory outlives the daemon, too (daemon/engines/kept_device.py).

The daemon holds the memory's file descriptors and the engine's account of which weights are where. The next engine gets both. It
maps the weights where they are and uses those whose checksum is still the same. As soon as the daemon tells an engine to load or
evict a model, that model is removed from the account, so a half-written model is never offered. The next engine may overwrite
everything else in the memory, KV included.

While the daemon holds the descriptors, the memory stays allocated: the device's driver counts it as used, although no engine uses
it. So the memory is freed whenever a new engine might not use it: see `ended`.
"""

from __future__ import annotations

import logging
import socket

from daemon.engines.kept_device import KeptDevice
from daemon.process.logs import fields
from engine import protocol
from engine.memory import handles

log = logging.getLogger("hearthd.engine")

EARLY_S, MAX_EARLY = 60.0, 2  # a request kills its engine at most twice (max_crashes), and the first of these deaths is not counted


class LeftMemory:
    """Holds one device's memory between two engines. is_host: whether the memory is the host's main memory, of which other programs
    have less while it is held.

    kept: stores the memory for the next daemon, too; None: the memory ends with this daemon.

    `exchange` runs in its own thread while an engine lives. The other methods run while no exchange runs, or on the event loop."""

    def __init__(self, device: str, is_host: bool, kept: KeptDevice | None = None) -> None:
        self._device, self._is_host, self._kept = device, is_host, kept
        self._handles: list[int] = []
        self._shape = (0, 0)  # (number of chunks, bytes of a chunk)
        self._weights: dict[str, protocol.WeightsHeld] = {}
        self._placed: dict[str, int] = {}  # model -> placement id of the load whose weights may be there
        self._adopted = False  # whether the running engine took the memory over
        self._num_early = 0  # engines in a row that took the memory over and died early

    @property
    def models(self) -> list[str]:
        """Returns the models whose weights the next engine would find in the memory."""
        return list(self._weights) if self._handles else []

    def take_up(self) -> None:
        """Takes over the memory that an earlier daemon left, if it holds weights of models that are known already and still have
        the same layout; otherwise frees it. Called once, before an engine asks for memory."""
        received = self._kept.take() if self._kept is not None else None
        if self._kept is None or received is None:
            return
        self._handles, self._shape = received.handles, (received.num_chunks, received.chunk_bytes)
        self._weights = self._kept.weights()
        if not self.models:
            self.let_go("")
            return
        self._kept.note(self._weights)
        num_bytes = sum(weights.num_bytes for weights in self._weights.values())
        text = "%.2f GiB of weights are on the device from before the restart: %s"
        log.info(text, num_bytes / 2**30, ", ".join(self.models), extra=fields(device=self._device))

    def exchange(self, sock: socket.socket) -> None:
        """Answers one engine's request for memory, and returns when that is done or the engine has died. If the held memory has the
        size that the engine wants and contains weights, sends its descriptors and the account of the weights. Otherwise receives
        the descriptors of the memory that the engine makes. sock: the connection to the engine."""
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
                    if self._kept is not None and self._handles:
                        self._kept.hold(self._handles, *self._shape)
            except OSError as error:
                log.debug("no memory is held for %s: %s", self._device, error)

    def sent(self, message: protocol.Message) -> None:
        """Takes note of a message that is about to be sent to the engine: if it tells the engine to load or evict a model, that
        model is removed from the account of the weights. Called for each message."""
        if isinstance(message, protocol.LoadModel):
            self._placed[message.model] = message.placement_id
        elif isinstance(message, protocol.EvictModel):
            self._placed.pop(message.model, None)
        else:
            return
        if self._weights.pop(message.model, None) is not None:
            self._note()

    def told(self, held: protocol.WeightsHeld) -> None:
        """Updates the account with an engine's report of the chunks in which it has put a loaded model's weights. A report is
        ignored if the model was evicted, or loaded again, meanwhile. Weights of an earlier engine in the same chunks are removed
        from the account, because they were overwritten."""
        if self._placed.get(held.model) == held.placement_id:
            chunks = set(held.chunks)
            self._weights = {name: other for name, other in self._weights.items() if chunks.isdisjoint(other.chunks)}
            self._weights[held.model] = held
            self._note()

    def ended(self, came_up: bool, lasted_s: float, distrusted: bool, kernel_killed: bool) -> None:
        """Decides, when an engine has ended, whether its device memory is kept for the next engine.

        The memory is freed if it holds no weights; if the device has a fault (distrusted); if the kernel killed the engine for lack
        of memory and this is host memory (kernel_killed); if the engine did not come up (came_up False); or if two engines in a row
        took the memory over and ended early, because the memory may be what makes them fail. lasted_s: seconds from the engine's
        start to its end."""
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
        """Closes the memory's descriptors, which frees it, and forgets the weights in it. why: the reason, for the log; "": nothing
        is logged."""
        if why and self.models:
            log.warning("weights on the device are given up: %s", why, extra=fields(device=self._device))
        if self._kept is not None and self._handles:
            self._kept.drop()
        handles.close(self._handles)
        self._handles, self._weights, self._num_early = [], {}, 0

    def _note(self) -> None:
        """Stores the account of the weights in the memory for the next daemon. Called after each change of the account; for a
        change because of a message to the engine, before the message is sent, so that the stored account never names weights that
        the engine may be overwriting."""
        if self._kept is not None:
            self._kept.note(self._weights)
