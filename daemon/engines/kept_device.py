"""Keeps one device's memory in the service manager's FD store for the next daemon, with an account of which weights are in it.

The memory may consist of thousands of descriptors (on CUDA one per chunk), so the store holds them in a socket
(daemon/process/queued_descriptors.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Sequence

import msgspec

from daemon.process.fd_store import FdStore
from daemon.process.formats import Format
from daemon.process.logs import fields
from daemon.process.queued_descriptors import queue_of, unqueue
from engine import protocol
from engine.memory import handles

log = logging.getLogger("hearthd.engine")
FORMAT = Format(version=1, reads_from=1, readable_from=1)


class _Weights(msgspec.Struct):
    layout: str  # see Registry.layout_id
    held: protocol.WeightsHeld


class _Content(msgspec.Struct):
    version: int
    device: str
    weights: list[_Weights]
    readable_from: int = 0  # see Format


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Content)


class KeptDevice:
    """The memory of one device in the FD store, and the account of the weights in it. layout_of: returns for a model's name a text
    that identifies how its weights lie in memory (Registry.layout_id). Raises OSError if the account cannot be made."""

    def __init__(self, store: FdStore, device: str, layout_of: Callable[[str], str]) -> None:
        self._store, self._device, self._layout_of = store, device, layout_of
        self._name = "device-" + hashlib.sha256(device.encode()).hexdigest()[:16]  # the store allows no ":" in a name
        found = store.take(self._name)
        self._account = store.account(f"{self._name}-account")
        self._found = found

    def take(self) -> handles.Received | None:
        """Returns the descriptors of the device memory that an earlier daemon left in the store; the store keeps its own
        duplicates. Returns None if there is no such memory, or it cannot be read; the store then drops it."""
        if self._found is None:
            return None
        fd, self._found = self._found, None
        try:
            received = unqueue(fd)
        except OSError as error:
            log.warning("memory of before the restart is lost: %s", error, extra=fields(device=self._device))
            self.drop()
            return None
        if received.handles:
            self.hold(received.handles, received.num_chunks, received.chunk_bytes)
        return received

    def weights(self) -> dict[str, protocol.WeightsHeld]:
        """Returns which weights are in the stored memory according to its account: model -> weights, for models whose weights still
        have the same layout."""
        try:
            content = _decoder.decode(self._account.read())
        except (msgspec.DecodeError, OSError):
            return {}
        if not FORMAT.reads(content.version, content.readable_from) or content.device != self._device:
            return {}
        good = (one for one in content.weights if one.layout and one.layout == self._layout_of(one.held.model))
        return {one.held.model: one.held for one in good}

    def hold(self, fds: Sequence[int], num_chunks: int, chunk_bytes: int) -> None:
        """Puts duplicates of the memory's descriptors into the store; logs a warning if they cannot be stored. num_chunks,
        chunk_bytes: the memory's size."""
        try:
            with queue_of(fds, num_chunks, chunk_bytes) as queue:
                self._store.put(self._name, queue.fileno())
        except OSError as error:
            text = "this device's memory does not outlive hearthd: %d descriptors cannot be kept: %s"
            log.warning(text, len(fds), error, extra=fields(device=self._device))

    def note(self, weights: dict[str, protocol.WeightsHeld]) -> None:
        """Replaces the account of which weights are in the memory. If it cannot be written, the memory is removed from the store,
        because the previous account may be wrong."""
        told = [_Weights(self._layout_of(model), held) for model, held in weights.items()]
        try:
            self._account.write(_encoder.encode(_Content(FORMAT.version, self._device, told, FORMAT.readable_from)))
        except OSError as error:  # the previous account must not be used then
            log.warning("what is on the device cannot be noted for the next hearthd: %s", error, extra=fields(device=self._device))
            self.drop()

    def drop(self) -> None:
        """Removes the device's memory from the store, and empties the account of its weights."""
        self._store.remove(self._name)
        with contextlib.suppress(OSError):
            self._account.write(b"")
        if self._found is not None:
            with contextlib.suppress(OSError):
                os.close(self._found)
            self._found = None
