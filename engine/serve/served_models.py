"""Manages the models of one engine, and the device memory they share. Which model owns which chunk is decided here and in
scheduler/batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.contracts.group_share import GroupShare
from engine.contracts.steps import CapturesSteps, HostedEncoder, HostedModel, LaunchesAhead, Proposed
from engine.host.threads_apart import ThreadsApart
from engine.memory.transfers import NUM_THREADS as NUM_COPY_THREADS
from engine.protocol import EAGLE3, MTP, Configure, LoadModel, Stats, WeightsHeld
from engine.serve.embedder import Embedder
from engine.serve.identity import adapter_source, kv_identity, weights_identity
from engine.serve.kv_caches import make_kv_cache
from loader.sizes.work_space import staged_tokens
from scheduler.batch.adapter_room import AdapterRoom
from scheduler.batch.adapters import ResidentAdapter
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.chunk_pool import ChunkPool, free_runs
from scheduler.batch.compaction import Compaction
from scheduler.batch.drafting import Drafter
from scheduler.batch.plan import BatchPlan, IntArray
from scheduler.batch.prompt_lookup import looked_up
from scheduler.batch.step_limits import StepLimits, turns_of_step
from scheduler.batch.step_room import StepRoom
from scheduler.batch.turns import Turns

log = logging.getLogger("engine")

CAPTURE_EVERY_DECODES = 16
# LoadModel.speculator -> drafter
DRAFTERS: dict[str, Drafter | None] = {"none": None, "prompt-lookup": looked_up, MTP: looked_up, EAGLE3: looked_up}


class Arena(Protocol):
    """The interface to the arena: the device memory of all chunks, as one range of addresses."""

    def discard(self, chunk: int, num_chunks: int, /) -> None:
        """Returns the memory of num_chunks chunks, from `chunk` on, to the system; their content is lost."""
        ...

    def copy_within(self, piece_bytes: int, sources: IntArray, targets: IntArray, /) -> None:
        """Copies piece sources[i] of the arena to piece targets[i], for all i; piece p is bytes [p * piece_bytes, (p + 1) *
        piece_bytes)."""
        ...


@dataclass(slots=True)
class Place:
    """The chunks of one model: those of its weights, and those for its reserved KV. owns_kv: whether the model owns the chunks `kv`
    until it is evicted, as a device's share of a split model does. If False, `kv` is held only while the model loads; then the
    model's BlockPools take the reserved chunks."""

    weights: IntArray
    kv: IntArray
    left: WeightsHeld | None = None  # the weights, if the chunks hold them already
    owns_kv: bool = False


@dataclass(slots=True)
class ServedModel:
    """A loaded model, the scheduler of its sequences, the chunks of its weights, and the limits of its steps."""

    spec: LoadModel
    hosted: HostedModel
    scheduler: BatchScheduler
    place: Place
    limits: StepLimits
    ahead: LaunchesAhead | None = None  # the hosted model, if it launches steps ahead
    captures: CapturesSteps | None = None
    share: GroupShare | None = None  # the hosted model, if it is split and this engine leads its group
    num_decodes: int = 0  # number of steps that only decoded
    num_leaving_chunks: int = 0
    turns: int = 0  # how many turns (time slices of a model) its latest step was planned to take (StepRoom)
    backlogged: bool = False  # when that step was planned, it had more to do than fits a turn
    unreported_steps: int = 0  # steps since the last report of tokens
    unreported_s: float = 0.0  # device seconds of these steps

    @property
    def most_under_way(self) -> int:
        """The most steps of this model that may be under way (started, without a result yet) while the engine does other work: 1 if
        the model can launch steps ahead, the number of stages less 1 if the model is split, else 0."""
        if self.share is not None:
            return self.share.num_stages - 1
        return int(self.ahead is not None)

    @property
    def is_broken(self) -> bool:
        """Returns whether this model is split and has lost one of its devices. It then takes no requests and runs no steps until it
        is evicted."""
        return self.share is not None and self.share.is_broken

    def take_steps(self) -> tuple[int, float]:
        """Returns the number of the model's steps since the last call, and the device seconds they took."""
        taken = self.unreported_steps, self.unreported_s
        self.unreported_steps, self.unreported_s = 0, 0.0
        return taken


class ServedModels:
    """All models loaded on one device, and the chunks of the device's memory. The engine's loop calls all methods, none while it
    computes a step itself; steps that were launched on the device, and first steps, may be running."""

    def __init__(
        self, configure: Configure, arena: Arena | None, left: Sequence[WeightsHeld] = (), compute_threads: int = 1
    ) -> None:
        """configure: the settings of the device.
        arena: the device's memory; None if the models have none (null models).
        left: weights that an earlier engine left in the arena.
        compute_threads: number of threads that compute in this engine."""
        self.by_name: dict[str, ServedModel] = {}
        self.embedders: dict[str, Embedder] = {}
        self.followed: dict[str, GroupShare] = {}  # shares of models that other engines lead; they have no turns here
        self._unscheduled_places: dict[str, Place] = {}  # places of encoders and of shares that other engines lead
        self.turns = Turns()
        self.threads = ThreadsApart(compute_threads)
        # Then a copy from the host tier and a concurrent step only slow each other down. First token of one-b in a conversation of
        # 1,000 tokens, 2 cores, as a multiple of copy time plus step time, each measured alone: 1.04-1.07 if the step runs during
        # the copy, 1.01-1.03 if it runs after it, as a recorded step.
        self.copies_take_all_cores = compute_threads <= NUM_COPY_THREADS
        self._configure = configure
        self._arena = arena
        work_chunks = -(-configure.work_space_bytes // configure.chunk_bytes)
        self.chunks = ChunkPool(
            configure.num_chunks, configure.chunk_bytes, resident_limit=max(0, configure.num_chunks - work_chunks)
        )
        self.compaction = Compaction(self._copy_blocks)
        self._adapter_room = AdapterRoom(self.chunks, self.compaction)
        self._preempted_before = 0  # number of preemptions in models that are no longer loaded
        self._limits: dict[tuple[str, str, str], StepLimits] = {}  # for all models ever loaded: learned costs stay valid
        self._left: dict[str, WeightsHeld] = {}
        if left:
            self._take_over(left)

    def busy(self) -> list[str]:
        """Returns the names of the models, encoders among them, that may have a step to run."""
        busy = [name for name, served in self.by_name.items() if served.scheduler.runnable and not served.is_broken]
        return busy + [name for name, embedder in self.embedders.items() if embedder.waiting]

    def next(self, busy: Sequence[str]) -> str | None:
        """Returns the name of the busy model that runs the next step, by turns (time slices of models); None if none is busy. busy:
        the names of the models that may have a step to run."""
        return self.turns.next(busy, self._backlogged(busy))

    def num_sharing(self, busy: Sequence[str]) -> int:
        """Returns how many models share the device's time: those that are busy, and those with running sequences whose steps
        another engine leads, because their streams, too, wait for each step on this device. busy: the names of this engine's models
        that may have a step to run."""
        return len(busy) + sum(share.has_sequences for share in self.followed.values())

    def room_of(self, served: ServedModel, busy: Sequence[str]) -> StepRoom:
        """Returns the limits (rows, tokens and time) of a model's next step. busy: the names of this engine's models that may have
        a step to run."""
        served.turns = turns_of_step(self.num_sharing(busy), len(self._backlogged(busy)), served.backlogged)
        return StepRoom(served.limits, served.turns, strict=self.turns.is_over)

    def _backlogged(self, busy: Sequence[str]) -> list[str]:
        return [name for name in busy if name in self.by_name and self.by_name[name].backlogged]

    def uncaptured(self) -> CapturesSteps | None:
        """Returns a model that has yet to capture steps of some size (to record them, so that later steps of that size start
        faster); None if there is no such model."""
        scheduled = (one.captures for one in self.by_name.values() if one.captures is not None)
        return next((one for one in (*scheduled, *self.followed.values()) if one.num_uncaptured), None)

    def capture_next(self) -> None:
        """Makes a model that has yet to capture steps (to record them, so that they start faster) capture those of one further
        size. Does nothing if there is no such model."""
        model = self.uncaptured()
        if model is not None:
            model.capture_next()
            if not model.num_uncaptured:
                log.info("%s: steps of every size are captured", model.name)

    def to_capture_between(self, served: ServedModel, plan: BatchPlan) -> CapturesSteps | None:
        """Returns the model if steps of one further size are to be captured (recorded) after this step, else None. A size is
        captured after every 16th step that only decoded (CAPTURE_EVERY_DECODES), if no other model is busy and this one does not
        launch steps ahead. Otherwise a model that always has requests, and so is never idle, would have captured nothing when a
        prompt arrives beside its streams."""
        if served.captures is None or served.ahead is not None or not plan.all_decode:
            return None
        served.num_decodes += 1
        if served.num_decodes % CAPTURE_EVERY_DECODES or not served.captures.num_uncaptured or self.num_sharing(self.busy()) > 1:
            return None
        return served.captures

    def charge(
        self, served: ServedModel, plan: BatchPlan, seconds: float, proposed: Proposed | None = None, waited_s: float = 0.0
    ) -> None:
        """Charges a step's device time to the model's turn and to the tenants, and learns what such steps cost. The time is
        `seconds` plus the time of the predictor (in `proposed`). waited_s: the part of `seconds` that passed until the other
        devices of a split model had begun the step; it does not count as the step's cost."""
        served.limits.note(plan, seconds - waited_s)
        if served.share is not None:
            served.limits.note_wait(waited_s)
        if proposed is not None:
            if plan.all_decode:
                served.limits.proposing.note(len(proposed.slots), proposed.tokens.shape[1], proposed.seen_s, proposed.drafting_s)
            seconds += proposed.seen_s + proposed.drafting_s
        self.turns.charge(served.spec.model, seconds, served.limits.turns_s(served.turns) if served.turns else None)
        served.unreported_steps += 1
        served.unreported_s += seconds
        served.scheduler.tenants.charge(plan, seconds)

    def __contains__(self, name: str) -> bool:
        return name in self.by_name or name in self.embedders or name in self.followed

    def take_place(self, spec: LoadModel) -> Place:
        """Takes the chunks that a model will own, before its load, and returns them. Raises MemoryError, and takes none, if there
        are too few."""
        left = self._left_of(spec)
        weights = self.chunks.take_left(spec.model) if left is not None else np.zeros(0, np.int32)
        kv = weights[:0]
        try:
            kv = self.chunks.hold(spec.kv_reserved_chunks)
            weights = np.concatenate((weights, self.chunks.take_weights(spec.weights_chunks - len(weights))))
        except MemoryError:
            self.chunks.release_hold(kv)
            self.chunks.give_back_weights(weights)
            raise
        self.discard_returned()
        return Place(weights, kv, left)

    def give_up_place(self, place: Place, left: WeightsHeld | None = None) -> None:
        """Frees the chunks of a failed load, or of a model whose sequences are closed and whose weights are unmapped. left: the
        weights that stay in the free chunks for the model's next load, until other content takes the chunks; None: no weights
        stay."""
        if place.owns_kv:
            self.chunks.give_back(place.kv, reserved=True)
        else:
            self.chunks.release_hold(place.kv)
        self.chunks.give_back_weights(place.weights)
        place.kv, place.weights = place.kv[:0], place.weights[:0]
        if left is not None:
            self.chunks.leave(left.model, np.array(left.chunks, np.int32))
            self._left[left.model] = left
        self.discard_returned()

    def _own_kv(self, place: Place) -> None:
        """Makes a device's share of a split model the owner of the chunks that are held for its reserved KV."""
        self.chunks.release_hold(place.kv)
        self.chunks.take(place.kv, reserved=True)
        place.owns_kv = True

    def make(self, spec: LoadModel, hosted: HostedModel, place: Place) -> ServedModel:
        """Returns a ServedModel of a loaded model; it is not in service before `add`. A split model has only its reserved chunks
        for KV, because its blocks must have the same numbers on all its devices. Raises MemoryError if the reserved chunks are not
        free, ValueError for KV groups that this engine cannot hold."""
        share = hosted if isinstance(hosted, GroupShare) else None
        max_tokens, num_stages = self._configure.max_num_batched_tokens, 1 if share is None else share.num_stages
        if num_stages > 1:
            max_tokens = staged_tokens(spec.max_sequences, max_tokens)
        if share is not None:
            self._own_kv(place)
            own_chunks = ChunkPool(spec.kv_reserved_chunks, self.chunks.chunk_bytes)
            kv = make_kv_cache(spec, hosted.kv_groups, own_chunks, max_tokens)
        else:
            self.chunks.release_hold(place.kv)
            place.kv = place.kv[:0]
            kv = make_kv_cache(spec, hosted.kv_groups, self.chunks, max_tokens)
            kv.reclaim = lambda num_chunks: self._reclaim(spec.model, num_chunks)
        limits = BatchLimits(
            max_sequences=spec.max_sequences,
            max_model_len=spec.max_model_len,
            max_num_batched_tokens=max_tokens,
            eos_token_ids=tuple(spec.eos_token_ids),
            fingerprint=weights_identity(spec),
            kv_dtype=kv_identity(spec),
            embeds=hosted.embeds,
            num_stages=num_stages,
        )
        pace = self._limits.setdefault(
            (spec.model, spec.fingerprint, limits.kv_dtype),
            StepLimits(self._configure.turn_budget_ms / 1e3, self._configure.max_step_stretch),
        )
        ahead = hosted if isinstance(hosted, LaunchesAhead) else None
        captures = hosted if isinstance(hosted, CapturesSteps) else None
        table = None if share is None else share.region.empty_table()
        scheduler = BatchScheduler(spec.model, kv, limits, DRAFTERS[spec.speculator], spec.predicts, table)
        if hosted.adapter_memory is not None:
            scheduler.adapters.dropped = hosted.adapter_memory.clear
        return ServedModel(spec, hosted, scheduler, place, pace, ahead, captures, share)

    def place_adapter(self, served: ServedModel, key: str, num_chunks: int) -> ResidentAdapter | None:
        """Takes num_chunks adjacent chunks from the KV lease for an adapter of this model that is not in memory, and returns the
        adapter with its chunks. Returns None if there is no room now. For an adapter that has waited for long, a run of adjacent
        chunks is reserved and emptied. key: the adapter's key (adapter_identity)."""
        scheduler = served.scheduler
        placed = scheduler.adapters.place(key, num_chunks, lambda num: self._make_room(served, num))
        if placed is None and scheduler.adapters.is_overdue(key):
            models = [each.scheduler for each in self.by_name.values() if each.share is None]
            if self._adapter_room.keep(scheduler, key, num_chunks, models):
                placed = scheduler.adapters.place(key, num_chunks)
        self.discard_returned()
        return placed

    def _make_room(self, served: ServedModel, num_chunks: int) -> int:
        """Frees up to num_chunks chunks for an adapter of this model: those of idle adapters, and those of other models' KV; if
        there are none of these, those of the model's own cached prefixes. Returns how many chunks became free for the KV lease."""
        given = self._reclaim(served.spec.model, num_chunks, for_kv=False)
        return given or self.compaction.give_up_prefixes(served.scheduler, num_chunks)

    @property
    def may_free_memory(self) -> bool:
        """Returns whether memory may become free before long: because a model is leaving, or because sequences run, on this engine
        or in a split model that another engine leads."""
        if self.chunks.num_leaving or any(served.scheduler.num_running for served in self.by_name.values()):
            return True
        return any(share.has_sequences for share in self.followed.values())

    def forget_costs(self) -> None:
        """Drops the costs of steps that were learned from earlier steps. Called when other kernels are put into use, which change
        how long steps take."""
        for limits in self._limits.values():
            limits.forget()
        for embedder in self.embedders.values():
            embedder.forget_costs()

    def add(self, served: ServedModel) -> None:
        """Puts a model into service. The model may use more chunks than the KV lease allows, so `keep_lease` must be called
        afterwards. If the model had a first step, the step's result must be processed before that call, because a sequence of the
        step must not be preempted."""
        self.by_name[served.spec.model] = served
        self.turns.add(served.spec.model)

    def keep_lease(self) -> None:
        """Frees chunks until no more are in use than the KV lease allows, as set_lease does."""
        self.set_lease(self.chunks.lease_chunks)

    def add_encoder(self, spec: LoadModel, hosted: HostedEncoder, place: Place) -> None:
        max_tokens, turn_s = self._configure.max_num_batched_tokens, self._configure.turn_budget_ms / 1e3
        self.embedders[spec.model] = Embedder(spec, hosted, max_tokens, turn_s)
        self._unscheduled_places[spec.model] = place
        self.turns.add(spec.model)

    def add_followed(self, share: GroupShare, place: Place) -> None:
        self._own_kv(place)
        self.followed[share.name] = share
        self._unscheduled_places[share.name] = place

    def remove_unscheduled(self, name: str, left: WeightsHeld | None = None) -> bool:
        """Removes an encoder, whose requests are dropped, or a share of a split model that another engine leads, frees its memory
        and returns True. Returns False if there is no such model of this name. left: the weights that stay in the freed chunks for
        the model's next load; None: none do."""
        embedder, share = self.embedders.pop(name, None), self.followed.pop(name, None)
        if embedder is not None:
            self.turns.remove(name)
            embedder.hosted.release()
        if share is not None:
            share.release()
        if embedder is None and share is None:
            return False
        self.give_up_place(self._unscheduled_places.pop(name), left)
        return True

    def detach(self, name: str) -> ServedModel | None:
        """Takes a model out of service and returns it. Its KV and weights stay in place until `free`; its adapters are dropped at
        once. Returns None if no model of this name is in service."""
        served = self.by_name.pop(name, None)
        if served is not None:
            self.turns.remove(name)
            self._preempted_before += served.scheduler.num_preemptions
            served.scheduler.adapters.give_up_all()
            served.num_leaving_chunks = served.scheduler.kv.keep_drawn() + len(served.place.weights)
            self.chunks.num_leaving += served.num_leaving_chunks
        return served

    def free(self, served: ServedModel, left: WeightsHeld | None = None) -> None:
        """Frees the memory of a model that `detach` returned, or that `make` made and `add` never put into service. left: the
        weights that stay in the freed chunks for the model's next load; None: none do."""
        self.chunks.num_leaving -= served.num_leaving_chunks
        served.scheduler.close()
        served.hosted.release()
        self.give_up_place(served.place, left)

    def set_lease(self, lease_chunks: int) -> None:
        """Sets the KV lease: how many chunks all models together may use beyond those that are reserved for them. If more are in
        use, chunks are freed until the lease is kept. In this order: idle adapters are dropped, chunks with few used blocks are
        emptied by moving these blocks to other chunks, cached prefixes are dropped, the newest sequences are preempted (whose
        adapters may then be idle and are dropped, too)."""
        self.chunks.set_lease(lease_chunks)
        self._give_up_idle_adapters(-self.chunks.room_chunks)
        drawing = [served.scheduler for served in self.by_name.values() if served.scheduler.num_drawn_chunks]
        for way in (self.compaction.gather, self.compaction.give_up_prefixes):
            for scheduler in drawing:
                if self.chunks.room_chunks < 0:
                    way(scheduler, -self.chunks.room_chunks)
        while self.chunks.room_chunks < 0:
            drawing = [scheduler for scheduler in drawing if scheduler.num_drawn_chunks]
            if not drawing:  # a model whose KV is being restored holds the other chunks; the lease is kept once it is served
                break
            most = max(drawing, key=lambda scheduler: scheduler.num_drawn_chunks)
            most.preempt_one()
            self._give_up_idle_adapters(-self.chunks.room_chunks)
            self.compaction.give_up_prefixes(most, -self.chunks.room_chunks)
        self.discard_returned()

    def discard_returned(self) -> None:
        """Returns the memory of freed chunks to the system, if more chunks have physical memory than the device's budget allows
        beside the work space."""
        for first_chunk, num_chunks in self.chunks.take_discards():
            if self._arena is not None:
                self._arena.discard(first_chunk, num_chunks)

    def stats(self, num_steps: int) -> Stats:
        models = {name: [0, 0, len(embedder.waiting), 0] for name, embedder in self.embedders.items()}
        num_chunks, preemptions = 0, self._preempted_before
        share_chunks: dict[str, int] = {}
        for name, served in self.by_name.items():
            scheduler, kv = served.scheduler, served.scheduler.kv
            models[name] = [
                kv.held_bytes,
                scheduler.num_running,
                scheduler.num_waiting,
                kv.cached_bytes,
            ]
            num_kv_chunks = kv.num_used_chunks
            if served.share is not None:
                share_chunks[name] = num_kv_chunks
            num_chunks += num_kv_chunks + scheduler.adapters.num_chunks
            preemptions += scheduler.num_preemptions
        adapters: dict[str, dict[str, int]] = {}
        for name, served in self.by_name.items():
            for key, adapter in served.scheduler.adapters.resident.items():  # versions of one adapter have the same name
                own, called = adapters.setdefault(name, {}), adapter_source(key).name
                own[called] = own.get(called, 0) + len(adapter.chunks) * self.chunks.chunk_bytes
        num_used = sum(served.scheduler.adapters.num_used_chunks for served in self.by_name.values())
        without_room = {name: num for name, served in self.by_name.items() if (num := served.scheduler.adapters.num_without_room)}
        of_adapters = (adapters, without_room, num_used * self.chunks.chunk_bytes)
        return Stats(num_chunks, models, num_steps, preemptions, self.compaction.moved_bytes, *of_adapters, share_chunks)

    # ---- weights that an earlier engine, or an earlier load of a model that comes back, left

    def _take_over(self, left: Sequence[WeightsHeld]) -> None:
        """Keeps the chunks that hold weights which an earlier engine left on the device, and returns the memory of all other chunks
        to the system."""
        for weights in left:
            try:
                self.chunks.leave(weights.model, np.array(weights.chunks, np.int32))
            except ValueError as error:
                log.warning("not taken over: %s", error)
            else:
                self._left[weights.model] = weights
        if self._arena is not None:
            for first_chunk, num_chunks in free_runs(self.chunks.choosable(0)).tolist():
                self._arena.discard(first_chunk, num_chunks)
        num_bytes = sum(weights.num_bytes for weights in self._left.values())
        log.info("an engine before this one has left %.2f GiB of weights: %s", num_bytes / 2**30, ", ".join(self._left))

    def _left_of(self, spec: LoadModel) -> WeightsHeld | None:
        """Returns the weights that this load needs, if an earlier engine or load has left them on the device, else None. If other
        weights of this model were left (other files, dtype, format or part of the model), their chunks count as empty from now
        on."""
        left = self._left.pop(spec.model, None)
        if left is None or spec.model not in self.chunks.left:
            return None
        same = (left.fingerprint, left.dtype, left.quantize) == (spec.fingerprint, spec.dtype, spec.quantize)
        same &= left.share == spec.share
        if not same or len(left.chunks) > spec.weights_chunks:
            self.chunks.forget_left(spec.model)
            return None
        return left

    def _reclaim(self, wanting: str, num_chunks: int, for_kv: bool = True) -> int:
        """Frees up to num_chunks chunks for the model `wanting`: drops idle adapters of any model that requests have used, then
        empties chunks of other models that have few used blocks, by moving these blocks to other chunks, then drops other models'
        cached prefixes. for_kv: whether the chunks are for KV; if True, idle adapters that no request has used yet are dropped
        last. Returns how many chunks became free for the KV lease."""
        given = self._give_up_idle_adapters(num_chunks, new_ones=False)
        for way in (self.compaction.gather, self.compaction.give_up_prefixes):
            for name, served in self.by_name.items():
                if name != wanting and given < num_chunks:
                    given += way(served.scheduler, num_chunks - given)
        return given + (self._give_up_idle_adapters(num_chunks - given) if for_kv else 0)

    def _give_up_idle_adapters(self, num_chunks: int, new_ones: bool = True) -> int:
        """Drops idle adapters of all models until num_chunks chunks have become free or there are no more idle adapters. Returns
        how many chunks became free. new_ones: whether adapters that no request has used yet are dropped, too."""
        given = 0
        for served in self.by_name.values():
            if given < num_chunks:
                given += served.scheduler.adapters.give_up_idle(num_chunks - given, new_ones)
        return given

    def _copy_blocks(self, block_bytes: int, sources: IntArray, targets: IntArray) -> None:
        if self._arena is not None:
            self._arena.copy_within(block_bytes, sources, targets)
