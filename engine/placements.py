"""Models that come and go: loads and evictions under way, the KV that outlives them, and what the daemon is told."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

from engine import kv_transfer
from engine.contracts import HostedEncoder, LoadCancelled
from engine.kv_transfer import KVTransfer
from engine.loads import Load, Loads
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_tier import HostTier
from engine.protocol import Evicted, EvictModel, LoadDone, LoadFailed, LoadModel, LoadProgress, Message
from engine.served_models import ServedModel, ServedModels

log = logging.getLogger("engine")


class Placements:
    """`forget(model)` drops what the engine's loop knows of an evicted model's requests. memory: None where no model has any.

    Not called while a step runs; copies run beside the steps of other models. A model is in one of these: loads.running, restoring
    (its weights are there, its KV is coming), models, leaving (its KV is going)."""

    def __init__(
        self,
        models: ServedModels,
        loads: Loads,
        send: Callable[[Message], None],
        forget: Callable[[str], None],
        memory: ChunkMemory | None = None,
        tier: HostTier | None = None,
    ) -> None:
        self._models, self._loads, self._send, self._forget = models, loads, send, forget
        self._memory, self._tier = memory, tier
        self._restoring: dict[str, tuple[Load, KVTransfer]] = {}
        self._leaving: dict[str, KVTransfer] = {}

    def fileno(self) -> int:
        """Readable when `take` has something to do."""
        return self._loads.fileno()

    @property
    def busy(self) -> bool:
        """Whether anything is being loaded or copied."""
        return bool(self._loads.running or self._restoring or self._leaving)

    def load(self, spec: LoadModel) -> None:
        name = spec.model
        if name in self._models or name in self._loads.running or name in self._restoring or name in self._leaving:
            text = f"model {name} is {'being evicted' if name in self._leaving else 'loaded or loading already'}"
            self._send(LoadFailed(spec.placement_id, name, text, False))
            return
        self._models.set_lease(spec.lease_chunks)
        try:
            place = self._models.take_place(spec)
        except MemoryError as error:
            self._send(LoadFailed(spec.placement_id, name, f"MemoryError: model {name}: {error}", False))
        else:
            self._loads.start(spec, place)

    def evict(self, message: EvictModel) -> None:
        name = message.model
        if (load := self._loads.running.get(name)) is not None:
            load.withdrawn_by.append(message.placement_id)
            load.cancelled.set()
        elif name in self._restoring:
            self._restoring[name][1].placement_ids.append(message.placement_id)
        elif name in self._leaving:
            self._leaving[name].placement_ids.append(message.placement_id)
        elif (served := self._models.detach(name)) is not None:
            self._save(served, message)
        else:
            if self._models.remove_encoder(name):
                self._forget(name)
            self._send(Evicted(message.placement_id, name))
        self._models.set_lease(message.lease_chunks)

    def take(self) -> None:
        """What the threads have to say."""
        for item in self._loads.take():
            if isinstance(item, LoadProgress):
                self._send(item)
            elif isinstance(item, Load):
                self._loaded(item)
            elif item.save:
                self._saved(item)
            else:
                self._restored(item)

    # ---- coming

    def _loaded(self, load: Load) -> None:
        spec, error = load.task.spec, load.error
        if load.hosted is not None and not load.cancelled.is_set():
            if isinstance(load.hosted, HostedEncoder):
                self._models.add_encoder(spec, load.hosted, load.place)
                self._told_loaded(load)
                return
            try:
                served = self._models.make(spec, load.hosted, load.place)
            except (MemoryError, ValueError) as failure:
                error = failure
            else:
                self._restore(load, served)
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

    def _restore(self, load: Load, served: ServedModel) -> None:
        transfer = kv_transfer.restoring(served, self._tier, self._memory)
        if transfer is None:
            self._models.add(served)
            self._told_loaded(load)
            return
        self._restoring[served.spec.model] = (load, transfer)
        self._loads.copy(transfer)

    def _restored(self, transfer: KVTransfer) -> None:
        load, _ = self._restoring.pop(transfer.served.spec.model)
        num_tokens = kv_transfer.restored(transfer)
        if transfer.placement_ids:  # evicted meanwhile
            self._models.free(transfer.served)
            for placement_id in transfer.placement_ids:
                self._send(Evicted(placement_id, transfer.served.spec.model))
            return
        self._models.add(transfer.served)
        load.task.copy_seconds += transfer.seconds
        load.seconds += transfer.seconds
        self._told_loaded(load, num_tokens)

    def _told_loaded(self, load: Load, restored_kv_tokens: int = 0) -> None:
        gc.collect()
        gc.freeze()
        task = load.task
        self._send(
            LoadDone(
                task.spec.placement_id,
                task.spec.model,
                load.seconds,
                task.bytes_read,
                kept=task.kept,
                checksum=task.checksum,
                copy_seconds=task.copy_seconds,
                map_seconds=task.map_seconds,
                restored_kv_tokens=restored_kv_tokens,
                source_rejected=task.source_rejected,
                read_as=task.read_as,
                kernels_seconds=task.kernels_seconds,
            )
        )

    # ---- going

    def _save(self, served: ServedModel, message: EvictModel) -> None:
        self._forget(message.model)
        try:
            transfer = kv_transfer.saving(served, message.save_slots, self._tier, self._memory)
        except IndexError as error:
            log.error("KV of %s is not saved: %s", message.model, error)
            transfer = kv_transfer.saving(served, [], self._tier, self._memory)
        transfer.placement_ids.append(message.placement_id)
        self._leaving[message.model] = transfer
        if transfer.pieces:
            self._loads.copy(transfer)
        else:
            self._saved(transfer)

    def _saved(self, transfer: KVTransfer) -> None:
        del self._leaving[transfer.served.spec.model]
        index = kv_transfer.index_of(transfer)
        num_saved = sum(transfer.num_tokens) if index else 0
        num_lost = transfer.num_lost_tokens
        if transfer.error is not None:
            log.error("KV of %s could not be saved: %s", transfer.served.spec.model, transfer.error)
            num_lost += sum(transfer.num_tokens)
        used = transfer.slots_used if index else []
        self._models.free(transfer.served)
        for placement_id in transfer.placement_ids:
            self._send(
                Evicted(placement_id, transfer.served.spec.model, index, used, num_saved, num_lost, copy_seconds=transfer.seconds)
            )
