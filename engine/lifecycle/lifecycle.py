"""Carries out the loads and evictions of the models on one device, step by step, and reports them to the daemon."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from engine.contracts.group_share import GroupShare
from engine.contracts.loads import KernelNews, LoadCancelled
from engine.contracts.steps import HostedEncoder
from engine.lifecycle import kv_transfer
from engine.lifecycle.first_step import FirstStep
from engine.lifecycle.kv_transfer import KVTransfer
from engine.lifecycle.life import Life, State
from engine.lifecycle.loads import Begun, Load, Loads, Streams, Summed
from engine.loading.left_weights import checksum_of
from engine.memory.chunk_memory import ChunkMemory, DeviceUnusable
from engine.memory.host_tier import HostTier
from engine.memory.out_of_memory import lacks_memory
from engine.protocol import Evicted, EvictModel, LoadDone, LoadFailed, LoadModel, LoadProgress, LoadStreams, Message, WeightsHeld
from engine.serve.adapter_loads import AdapterRead
from engine.serve.served_models import ServedModels
from engine.serve.splitting import why_not_split
from scheduler.batch.plan import BatchPlan

log = logging.getLogger("engine")


class Lifecycle:
    """Moves every model on the device through its states, from load to eviction (engine/lifecycle/life.py). The engine's loop calls
    its methods, between the steps that it runs. Loads, first steps and copies of KV run in threads of their own, concurrently with
    steps of other models.

    send: sends a message to the daemon.
    forget(model): drops the loop's records of an evicted model's requests.
    resume(first): processes the result of a first step and the messages that were deferred while it ran.
    loaded(): called after each report that a load has succeeded.
    adapter_read(read): called with each AdapterRead that has ended.
    check_device(): called after a load has failed for a reason that may lie with the device. Raises the device's error if it
    computes nothing any more.
    memory, tier: the device's memory and the host tier; None: there is none.
    outlives: whether the daemon keeps the device's memory when this process ends; if True, the daemon is told which chunks hold
    weights."""

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
        adapter_read: Callable[[AdapterRead], None] = lambda read: None,
        check_device: Callable[[], None] = lambda: None,
        outlives: bool = False,
    ) -> None:
        self._models, self._loads, self._send, self._forget, self._resume = models, loads, send, forget, resume
        self._has_loaded, self._adapter_read, self._outlives = loaded, adapter_read, outlives
        self._memory, self._tier, self._check_device = memory, tier, check_device
        self.lives: dict[str, Life] = {}
        self.first_steps: dict[str, FirstStep] = {}  # model -> its first step, kept for the loop, which looks before every step

    def fileno(self) -> int:
        """Returns a descriptor that is readable when threads have reported something that `take` must process."""
        return self._loads.fileno()

    @property
    def busy(self) -> bool:
        """Returns whether any model is being loaded, restored or evicted, or its first step may still run."""
        return any(life.state is not State.SERVED for life in self.lives.values())

    @property
    def may_free_memory(self) -> bool:
        """Returns whether memory may become free before long, because a model is leaving or being loaded, or because sequences run.
        A load counts because the daemon evicts no other model for waiting requests until the load has ended."""
        return self.busy or self._models.may_free_memory

    # ---- messages of the daemon

    def load(self, spec: LoadModel) -> None:
        if why_not := why_not_split(spec):
            self._send(LoadFailed(spec.placement_id, spec.model, f"model {spec.model}: parallel: {why_not}", True))
            return
        life = self.lives.get(spec.model)
        if life is not None:
            is_now = "being evicted" if life.state is State.LEAVING else "loaded or loading already"
            self._send(LoadFailed(spec.placement_id, spec.model, f"model {spec.model} is {is_now}", False))
            return
        self._models.set_lease(spec.lease_chunks)
        try:
            place = self._models.take_place(spec)
        except MemoryError as error:
            self._send(LoadFailed(spec.placement_id, spec.model, f"MemoryError: model {spec.model}: {error}", False))
        else:
            self.lives[spec.model] = Life(self._loads.start(spec, place))

    def evict(self, message: EvictModel) -> None:
        """Begins to evict a model: at once if it is served, else when the jobs that run for it have ended. If its load still runs,
        the load is cancelled. A model that is not on this device is reported as evicted. The KV lease becomes the one in the
        message."""
        life = self.lives.get(message.model)
        if life is None:
            self._send(Evicted(message.placement_id, message.model))
        elif life.state is State.SERVED:
            self._leave(life, message)
        else:
            life.evictions.append(message)
            if life.load_runs:
                life.load.cancelled.set()
        self._models.set_lease(message.lease_chunks)

    # ---- reports of jobs

    def take(self) -> None:
        """Processes everything that the threads of loads, first steps and transfers of KV have reported since the last call. Raises
        the device's error if a load has failed because the device cannot be used any more: only a new process can use it then."""
        for item in self._loads.take():
            match item:
                case LoadProgress():
                    self._send(item)
                case AdapterRead():
                    self._adapter_read(item)
                case KernelNews():
                    if item.apply is not None:
                        item.apply()
                        self._models.forget_costs()
                    self._send(item.told)
                case Begun():
                    self._model_exists(item)
                case Streams():
                    self._first_weights_are_in(item.load)
                case Load():
                    self._load_ended(self.lives[item.task.spec.model])
                case FirstStep():
                    self._step_ended(item)
                case KVTransfer():
                    life = self.lives[item.served.spec.model]
                    if item.save:
                        self._saved(life, item)
                    else:
                        self._restored(life, item)
                case Summed():
                    self._report_weights(item.load)

    def _model_exists(self, begun: Begun) -> None:
        """Makes the ServedModel of a load whose weights are still arriving, and its first step, and starts to restore its saved KV.
        Does nothing if the load was cancelled, or if the ServedModel cannot be made; the same error is then met and reported when
        the load ends."""
        load, life = begun.load, self.lives[begun.load.task.spec.model]
        if load.cancelled.is_set():
            return
        try:
            served = self._models.make(load.task.spec, begun.hosted, load.place)
        except (MemoryError, ValueError):
            return  # the end of the load will meet the same error and report it
        assert load.gate is not None
        first = FirstStep(served, begun.hosted, load.gate)
        if load.task.spec.source_slots and self._models.copies_take_all_cores:
            first.waits_for = load.task
        life.served = served
        self._set_first(life, first)
        life.enter(State.STREAMING)
        life.restore = kv_transfer.restoring(served, self._tier, self._memory)
        if life.restore is not None:
            self._loads.copy(life.restore)

    def _first_weights_are_in(self, load: Load) -> None:
        life = self.lives.get(load.task.spec.model)
        if life is not None and life.load is load and life.first is not None:
            life.first.has_begun = True
            self._offer(life)

    def _offer(self, life: Life) -> None:
        """Tells the daemon (LoadStreams) that requests for a model may be submitted, if everything that the model's first step
        needs to begin has arrived: the first weights and the saved KV."""
        if life.first is not None and life.first.has_begun and life.restore is None:
            self._send(LoadStreams(life.load.task.spec.placement_id, life.name))

    def _load_ended(self, life: Life) -> None:
        load, life.load_runs = life.load, False
        if life.restore is not None:  # no request has been submitted to it yet
            self._set_first(life, None)
            life.enter(State.LOADED)
        elif life.first is not None:
            self._streaming_ended(life, life.first)
        elif load.hosted is None or load.cancelled.is_set():
            self._end_load(life, load.error)
        elif isinstance(load.hosted, HostedEncoder) or (isinstance(load.hosted, GroupShare) and not load.hosted.leads):
            if isinstance(load.hosted, GroupShare):
                self._models.add_followed(load.hosted, load.place)
            else:
                self._models.add_encoder(load.task.spec, load.hosted, load.place)
            life.enter(State.SERVED)
            self._report_load(life)
        else:
            try:
                life.served = self._models.make(load.task.spec, load.hosted, load.place)
            except (MemoryError, ValueError) as error:
                self._end_load(life, error)
                return
            life.restore = kv_transfer.restoring(life.served, self._tier, self._memory)
            if life.restore is None:
                self._serve(life)
                self._report_load(life)
            else:
                life.enter(State.LOADED)
                self._loads.copy(life.restore)

    def _streaming_ended(self, life: Life, first: FirstStep) -> None:
        """Processes the end of a load whose model exists already (state STREAMING). If the load succeeded, the model is served, at
        once or when its first step has ended; else the model is freed."""
        if life.load.hosted is None:
            self._end_load(life, life.load.error)
            return
        first.loaded, first.loaded_s = True, time.monotonic()
        self._report_load(life, first.restored_tokens)
        if first.running:
            life.enter(State.LOADED)
        else:
            self._serve(life)

    def _end_load(self, life: Life, error: Exception | None) -> None:
        """Frees a model that will not be served, reports why its load failed, and answers its evictions. error: why the load
        failed; None: it did not fail, so nothing is reported. The failure of a cancelled load is not reported either."""
        load = life.load
        if error is not None:
            self._raise_devices(error)
        del self.lives[life.name]
        if life.first is not None:
            self._set_first(life, None)
            self._forget(life.name)
        if life.served is not None:
            self._models.free(life.served)
        else:
            if load.hosted is not None:
                load.hosted.release()
                load.hosted = None
            self._models.give_up_place(load.place)
        if error is not None and not load.cancelled.is_set():
            if isinstance(error, LoadCancelled):
                error = RuntimeError("the load was cancelled, though nobody asked for it")
            permanent = bool(getattr(error, "permanent", False))
            spec = load.task.spec
            self._send(LoadFailed(spec.placement_id, spec.model, f"{type(error).__name__}: {error}", permanent))
        for eviction in life.evictions:
            self._send(Evicted(eviction.placement_id, life.name))

    def _raise_devices(self, error: Exception) -> None:
        """Raises the device's error if the failure of a load shows that the device cannot be used any more. Otherwise every later
        load would fail, too. error: why the load failed."""
        if isinstance(error, DeviceUnusable):
            raise error
        if isinstance(error, RuntimeError) and not lacks_memory(error):
            self._check_device()

    def _restored(self, life: Life, transfer: KVTransfer) -> None:
        load, num_tokens, life.restore = life.load, kv_transfer.restored(transfer), None
        if life.first is not None:  # its weights are still arriving
            life.first.restored_tokens = num_tokens
            self._offer(life)
        elif load.hosted is None or life.evictions:
            self._end_load(life, load.error)
        else:
            self._serve(life)
            waited_s = max(0.0, time.monotonic() - load.started_s - load.seconds)
            load.task.copy_seconds += waited_s
            load.seconds += waited_s
            self._report_load(life, num_tokens)

    # ---- first steps

    def start(self, first: FirstStep, step_id: int) -> BatchPlan | None:
        """Starts a model's first step in a thread. Returns the step's plan; None if there is nothing to compute."""
        others_run = bool(self._models.busy()) or any(one.running for one in self.first_steps.values())
        return first.start(step_id, self._loads.step, alone=not others_run)

    def _step_ended(self, first: FirstStep) -> None:
        life = self.lives.get(first.served.spec.model)
        if life is None or life.first is not first:  # its load has failed meanwhile
            return
        first.running = False
        if first.loaded:
            self._serve(life)
        elif first.error is not None:
            first.put_back()
            self._resume(first)

    def _set_first(self, life: Life, first: FirstStep | None) -> None:
        life.first = first
        if first is None:
            del self.first_steps[life.name]
        else:
            self.first_steps[life.name] = first

    # ---- serving and evicting

    def _serve(self, life: Life) -> None:
        """Puts a model into service, so that it takes part in the engine's turns, and processes the result of its first step, if it
        had one. Then begins the evictions that were asked for while its jobs ran."""
        assert life.served is not None
        first, evictions, life.evictions = life.first, life.evictions, []
        life.enter(State.SERVED)
        self._models.add(life.served)
        if first is not None:
            self._set_first(life, None)
            self._models.turns.set_weight(life.name, first.weight)
            self._resume(first)
        self._models.keep_lease()
        for message in evictions:  # the lease may have changed since the message came
            self.evict(msgspec.structs.replace(message, lease_chunks=self._models.chunks.lease_chunks))

    def _leave(self, life: Life, message: EvictModel) -> None:
        """Takes a served model out of service, and begins to save its KV. An encoder, or a share of a split model whose steps
        another engine leads, has no KV to save, and is freed and reported as evicted at once."""
        served = self._models.detach(life.name)
        self._forget(life.name)
        if served is None:
            self._models.remove_unscheduled(life.name, self._left_by(life.load) if message.comes_back else None)
            del self.lives[life.name]
            self._send(Evicted(message.placement_id, life.name))
            return
        slots = message.save_slots if served.share is None else []  # each device of a group has only a part of its KV
        try:
            transfer = kv_transfer.saving(served, slots, self._tier, self._memory)
        except IndexError as error:
            log.error("KV of %s is not saved: %s", life.name, error)
            transfer = kv_transfer.saving(served, [], self._tier, self._memory)
        life.enter(State.LEAVING)
        life.save = transfer
        life.evictions.append(message)
        if transfer.pieces:
            self._loads.copy(transfer)
        else:
            self._saved(life, transfer)

    def _saved(self, life: Life, transfer: KVTransfer) -> None:
        del self.lives[life.name]
        index = kv_transfer.index_of(transfer)
        num_saved = sum(transfer.num_tokens) if index else 0
        num_lost = transfer.num_lost_tokens
        if transfer.error is not None:
            log.error("KV of %s could not be saved: %s", life.name, transfer.error)
            num_lost += sum(transfer.num_tokens)
        used = transfer.slots_used if index else []
        comes_back = any(eviction.comes_back for eviction in life.evictions)
        self._models.free(transfer.served, self._left_by(life.load) if comes_back else None)
        for eviction in life.evictions:
            saved = (index, used, num_saved, num_lost)
            self._send(Evicted(eviction.placement_id, life.name, *saved, copy_seconds=transfer.seconds))

    # ---- reports

    def _report_load(self, life: Life, restored_kv_tokens: int = 0) -> None:
        load, task = life.load, life.load.task
        self._send(
            LoadDone(
                task.spec.placement_id,
                task.spec.model,
                load.seconds,
                task.bytes_read,
                kept=task.kept,
                checksums=[task.checksum] if task.kept else [],
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
                self._report_weights(load)
            else:
                chunks = load.place.weights
                self._loads.sum_up(load, partial(checksum_of, self._memory, chunks, task.weights_bytes))

    def _report_weights(self, load: Load) -> None:
        """Reports to the daemon which chunks hold the weights of a load (WeightsHeld), so that a later engine can use them. Reports
        nothing if the model has been evicted, because its chunks are free then."""
        held = self._left_by(load)
        if held is not None:
            self._send(held)

    def _left_by(self, load: Load) -> WeightsHeld | None:
        """Returns which chunks hold the weights of a load; None if it has no weights that can be used again, or if its model has
        been evicted."""
        if self._memory is None:
            return None
        task, spec = load.task, load.task.spec
        chunks: list[int] = load.place.weights[: -(-task.weights_bytes // self._memory.chunk_bytes)].tolist()
        if not chunks:
            return None
        held = (spec.fingerprint, spec.dtype, spec.quantize, task.weights_bytes, chunks, task.weights_checksum)
        return WeightsHeld(spec.placement_id, spec.model, *held, spec.share)

    def validate(self) -> None:
        """Checks that the states of the models, their first steps and the served models agree. Raises AssertionError if they do
        not. For tests."""
        for name, life in self.lives.items():
            assert life.name == name, name
            life.validate()
        assert self.first_steps == {name: life.first for name, life in self.lives.items() if life.first is not None}
        served = {name for name, life in self.lives.items() if life.state is State.SERVED}
        models = self._models
        assert served == {*models.by_name, *models.embedders, *models.followed}, (served, [*models.by_name])
