"""Placements of models on one device: loads and evictions under way, the KV that outlives them, and what is reported to the
daemon.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from engine.contracts.loads import KernelNews, LoadCancelled
from engine.contracts.steps import HostedEncoder
from engine.lifecycle import kv_transfer
from engine.lifecycle.first_step import FirstStep
from engine.lifecycle.kv_transfer import KVTransfer
from engine.lifecycle.loads import Begun, Load, Loads, Streams, Summed
from engine.loading.left_weights import checksum_of
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_tier import HostTier
from engine.protocol import Evicted, EvictModel, LoadDone, LoadFailed, LoadModel, LoadProgress, LoadStreams, Message, WeightsHeld
from engine.serve.served_models import ServedModel, ServedModels
from scheduler.batch.plan import BatchPlan

log = logging.getLogger("engine")


class Placements:
    """Carries out loads and evictions. Not called while a step runs; copies and first steps run concurrent with steps of other
    models.

    forget(model): drops what the engine's loop knows of an evicted model's requests. resume(first): takes in the result of a first
    step and the messages deferred meanwhile. loaded(): called after each report of a load. memory: None if no model has any.
    outlives: whether the daemon keeps the memory beyond this process; it is then told where weights are.

    A model is in one of these: loads.running (and also in `first` if prompts may run while its weights arrive, once saved KV is
    restored), `first` (its weights have arrived, its first step is still running), _restoring (its load has ended, its KV is being
    restored), the served models, _leaving (its KV is being saved)."""

    def __init__(
        self,
        models: ServedModels,
        loads: Loads,
        send: Callable[[Message], None],
        forget: Callable[[str], None],
        memory: ChunkMemory | None = None,
        tier: HostTier | None = None,
        resume: Callable[[FirstStep], None] = lambda first: None,
        loaded: Callable[[], None] = lambda: None,
        outlives: bool = False,
    ) -> None:
        self._models, self._loads, self._send, self._forget, self._resume = models, loads, send, forget, resume
        self._has_loaded, self._outlives = loaded, outlives
        self.first: dict[str, FirstStep] = {}
        self._memory, self._tier = memory, tier
        self._restoring: dict[str, tuple[Load, KVTransfer]] = {}
        self._leaving: dict[str, KVTransfer] = {}

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `take` has something to do."""
        return self._loads.fileno()

    @property
    def busy(self) -> bool:
        """Whether anything is being loaded or copied."""
        return bool(self._loads.running or self.first or self._restoring or self._leaving)

    def load(self, spec: LoadModel) -> None:
        name = spec.model
        if any(name in those for those in (self._models, self._loads.running, self.first, self._restoring, self._leaving)):
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
        elif name in self.first:
            self.first[name].leaves_later.append(message)
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
        """Handles everything that the threads of loads, copies and first steps have reported."""
        for item in self._loads.take():
            if isinstance(item, LoadProgress):
                self._send(item)
            elif isinstance(item, KernelNews):
                if item.apply is not None:
                    item.apply()
                    self._models.forget_costs()
                self._send(item.told)
            elif isinstance(item, Load):
                self._loaded(item)
            elif isinstance(item, Begun):
                self._begun(item)
            elif isinstance(item, Streams):
                first = self.first.get(item.load.task.spec.model)
                if first is not None and first.gate is item.load.gate:
                    first.has_begun = True
                    self._take_requests(first)
            elif isinstance(item, FirstStep):
                self._stepped(item)
            elif isinstance(item, Summed):
                self._tell_held(item.load)
            elif item.save:
                self._saved(item)
            else:
                self._restored(item)

    # ---- loading

    def _begun(self, begun: Begun) -> None:
        load = begun.load
        assert load.gate is not None
        spec = load.task.spec
        if load.cancelled.is_set():
            return
        try:
            served = self._models.make(spec, begun.hosted, load.place)
        except (MemoryError, ValueError):
            return  # the end of the load meets the same error and reports it
        first = self.first[spec.model] = FirstStep(served, begun.hosted, load.gate)
        if spec.source_slots and self._models.copies_take_all_cores:
            first.waits_for = load.task
        first.restoring = kv_transfer.restoring(served, self._tier, self._memory)
        if first.restoring is not None:
            self._loads.copy(first.restoring)

    def _take_requests(self, first: FirstStep) -> None:
        """Reports that requests may be submitted, once everything that the first step begins with has arrived."""
        if first.has_begun and first.restoring is None:
            self._send(LoadStreams(first.served.spec.placement_id, first.served.spec.model))

    def start(self, first: FirstStep, step_id: int) -> BatchPlan | None:
        """Starts a model's first step. Returns its plan; None if there is nothing to compute."""
        others_run = bool(self._models.busy()) or any(one.running for one in self.first.values())
        return first.start(step_id, self._loads.step, alone=not others_run)

    def _stepped(self, first: FirstStep) -> None:
        if self.first.get(first.served.spec.model) is not first:  # its load has failed meanwhile
            return
        first.running = False
        if first.loaded:
            self._serve(first)
        elif first.error is not None:
            first.put_back()
            self._resume(first)

    def _serve(self, first: FirstStep) -> None:
        del self.first[first.served.spec.model]
        self._models.add(first.served)
        self._models.turns.set_weight(first.served.spec.model, first.weight)
        self._resume(first)
        for message in first.leaves_later:  # the lease may have changed since then
            self.evict(msgspec.structs.replace(message, lease_chunks=self._models.chunks.lease_chunks))

    def _streamed(self, load: Load, first: FirstStep) -> None:
        """Handles the end of a load whose model may already be running its first step."""
        name = load.task.spec.model
        if first.restoring is not None:  # no request was submitted to it yet
            del self.first[name]
            self._restoring[name] = (load, first.restoring)
            return
        if load.hosted is None:
            del self.first[name]
            self._forget(name)
            self._models.free(first.served)
            self._told_failed(load, load.error)
            return
        first.loaded, first.loaded_s = True, time.monotonic()
        self._told_loaded(load, first.restored_tokens)
        first.leaves_later += [EvictModel(placement_id, name, 0) for placement_id in load.withdrawn_by]
        if not first.running:
            self._serve(first)

    def _loaded(self, load: Load) -> None:
        spec, error = load.task.spec, load.error
        if (first := self.first.get(spec.model)) is not None:
            self._streamed(load, first)
            return
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
        self._told_failed(load, error)

    def _told_failed(self, load: Load, error: Exception | None) -> None:
        spec = load.task.spec
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
        spec, num_tokens = transfer.served.spec, kv_transfer.restored(transfer)
        first = self.first.get(spec.model)
        if first is not None:  # its weights are still arriving
            first.restoring, first.restored_tokens = None, num_tokens
            self._take_requests(first)
            return
        load, _ = self._restoring.pop(spec.model)
        if load.cancelled.is_set() or load.hosted is None or transfer.placement_ids:
            self._models.free(transfer.served)
            if load.cancelled.is_set() or load.hosted is None:
                self._told_failed(load, load.error)
            for placement_id in transfer.placement_ids:
                self._send(Evicted(placement_id, spec.model))
            return
        self._models.add(transfer.served)
        waited_s = max(0.0, time.monotonic() - load.started_s - load.seconds)
        load.task.copy_seconds += waited_s
        load.seconds += waited_s
        self._told_loaded(load, num_tokens)

    def _told_loaded(self, load: Load, restored_kv_tokens: int = 0) -> None:
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
                adopted=task.adopted,
            )
        )
        self._has_loaded()
        if self._outlives and task.weights_bytes and self._memory is not None:
            if task.weights_checksum:
                self._tell_held(load)
            else:
                chunks = load.place.weights
                self._loads.sum_up(load, partial(checksum_of, self._memory, chunks, task.weights_bytes))

    def _tell_held(self, load: Load) -> None:
        """Reports where the model's weights are, unless the model has begun to leave: the daemon then knows better."""
        task, spec, size = load.task, load.task.spec, self._memory.chunk_bytes if self._memory is not None else 1
        chunks = load.place.weights[: -(-task.weights_bytes // size)].tolist()
        if chunks:  # empty once it has left
            told = (spec.fingerprint, spec.dtype, spec.quantize, task.weights_bytes, chunks, task.weights_checksum)
            self._send(WeightsHeld(spec.placement_id, spec.model, *told))

    # ---- evicting

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
