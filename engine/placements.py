"""Models that come and go: loads under way, evictions, and what the daemon is told of them."""

from __future__ import annotations

import gc
from collections.abc import Callable

from engine.contracts import HostedEncoder, LoadCancelled
from engine.loads import Load, Loads
from engine.protocol import Evicted, EvictModel, LoadDone, LoadFailed, LoadModel, LoadProgress, Message
from engine.served_models import ServedModels


class Placements:
    """`forget(model)` drops what the engine's loop knows of an evicted model's requests. Not called while a step runs."""

    def __init__(self, models: ServedModels, loads: Loads, send: Callable[[Message], None], forget: Callable[[str], None]) -> None:
        self._models, self._loads, self._send, self._forget = models, loads, send, forget

    def fileno(self) -> int:
        """Readable when `take` has something to do."""
        return self._loads.fileno()

    def load(self, spec: LoadModel) -> None:
        if spec.model in self._models or spec.model in self._loads.running:
            text = f"model {spec.model} is loaded or loading already"
            self._send(LoadFailed(spec.placement_id, spec.model, text, False))
            return
        self._models.set_lease(spec.lease_chunks)
        try:
            place = self._models.take_place(spec)
        except MemoryError as error:
            self._send(LoadFailed(spec.placement_id, spec.model, f"MemoryError: model {spec.model}: {error}", False))
        else:
            self._loads.start(spec, place)

    def evict(self, message: EvictModel) -> None:
        name = message.model
        load = self._loads.running.get(name)
        if self._models.remove(name):
            self._forget(name)
        self._models.set_lease(message.lease_chunks)
        if load is None:
            self._send(Evicted(message.placement_id, name))
        else:
            load.withdrawn_by.append(message.placement_id)
            load.cancelled.set()

    def take(self) -> None:
        """What the loader threads have to say."""
        for item in self._loads.take():
            if isinstance(item, LoadProgress):
                self._send(item)
            else:
                self._loaded(item)

    def _loaded(self, load: Load) -> None:
        spec, error = load.task.spec, load.error
        if load.hosted is not None and not load.cancelled.is_set():
            try:
                if isinstance(load.hosted, HostedEncoder):
                    self._models.add_encoder(spec, load.hosted, load.place)
                else:
                    self._models.add(spec, load.hosted, load.place)
            except (MemoryError, ValueError) as failure:
                error = failure
            else:
                gc.collect()
                gc.freeze()
                task = load.task
                self._send(LoadDone(spec.placement_id, spec.model, load.seconds, task.bytes_read, map_seconds=task.map_seconds))
                return
        if load.hosted is not None:
            load.hosted.release()
            load.hosted = None
        self._models.give_up_place(load.place)
        if load.cancelled.is_set():
            for placement_id in load.withdrawn_by:
                self._send(Evicted(placement_id, spec.model))
            return
        if isinstance(error, LoadCancelled):
            error = RuntimeError("the load was cancelled, though nobody asked for it")
        permanent = bool(getattr(error, "permanent", False))
        self._send(LoadFailed(spec.placement_id, spec.model, f"{type(error).__name__}: {error}", permanent))
