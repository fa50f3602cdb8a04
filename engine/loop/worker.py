"""The engine's loop: receives the daemon's messages, runs the next model's step, and sends one message with the step's tokens.

The loop blocks in epoll while nothing runs. Before a step starts, its requests are written to the step journal in shared memory, so
the daemon knows what was running if the process dies in the step. Any exception in a step ends the process: the daemon starts a new
one and submits the requests again. Only a step that lacks memory to compute does not end the process: its own requests fail, and
all others go on."""

from __future__ import annotations

import logging
import mmap
import os
import select
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import msgspec
import numpy as np

from engine.contracts.group_share import GroupShare
from engine.contracts.loads import Runner
from engine.contracts.ranks import GroupBroken
from engine.contracts.steps import Launched, NoWorkSpace, StepResult
from engine.exchange import Membership
from engine.grammar.row_masks import RowMasks
from engine.lifecycle.first_step import NO_REQUESTS, FirstStep
from engine.lifecycle.lifecycle import Lifecycle
from engine.lifecycle.loads import Loads
from engine.loop.expert_news import ExpertNews
from engine.loop.garbage_collector import GarbageCollector
from engine.loop.group_steps import ASK_EVERY_S, GroupSteps, PostedStep, broke
from engine.loop.idle_work import IdleWork
from engine.loop.pulse import BEAT_EVERY_S, Doing
from engine.loop.step_journal import StepJournal
from engine.loop.under_way import StepUnderWay
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_tier import HostTier
from engine.memory.preparing import Preparer
from engine.protocol import (
    EMBED,
    FINISH_LENGTH,
    FINISH_STOP,
    PROTOCOL_VERSION,
    SCORE,
    Abort,
    BringAdapter,
    Configure,
    EngineReady,
    EvictModel,
    LoadModel,
    Probe,
    Probed,
    RequestFailed,
    RetireAdapter,
    SetLease,
    Shutdown,
    Submit,
    TokensOut,
    WeightsHeld,
)
from engine.serve.adapter_loads import AdapterLoads
from engine.serve.answers import answer
from engine.serve.channel import Channel, ChannelClosed
from engine.serve.constraints import Constraints, End
from engine.serve.embedder import Embedder
from engine.serve.requests import VECTOR_PARAMS, batch_request
from engine.serve.served_models import ServedModel, ServedModels
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.plan import BatchPlan, LongArray
from scheduler.batch.steps_ahead import TokensNeeded
from scheduler.report_intervals import STATS_EVERY_S

log = logging.getLogger("engine")

MAX_BACKLOG_BYTES = 8 << 20


class Engine:
    """The engine of one device: its models, their requests and the loop that runs their steps. `run` returns when the channel to
    the daemon is closed or on Shutdown.
    runner, memory: what loads and runs models on the device, and the device's memory; memory is None for null models.
    tier: the host tier; None: there is none.
    left: weights that an earlier engine left in device memory; None: the memory ends with this process.
    membership: the engine's access to the memory that engines share to run split models; None: it runs no split models."""

    def __init__(
        self,
        channel: Channel,
        journal: mmap.mmap,
        configure: Configure,
        runner: Runner,
        memory: ChunkMemory | None,
        tier: HostTier | None = None,
        left: Sequence[WeightsHeld] | None = None,
        membership: Membership | None = None,
    ) -> None:
        self.channel = channel
        self.configure = configure
        self._probe = runner.probe
        self.models = ServedModels(configure, memory, left or (), runner.compute_threads)
        loads = Loads(runner, configure.test_disk_bytes_per_s, configure.test_copy_bytes_per_s)
        self._collector = GarbageCollector()
        self.adapters = AdapterLoads(
            self.models,
            memory,
            reads=loads,
            send=channel.send,
            fail=self._fail_request,
            await_steps=self._finish_launched,
        )
        self.lifecycle = Lifecycle(
            self.models,
            loads,
            send=channel.send,
            forget=self._forget,
            memory=memory,
            tier=tier,
            resume=self._resume,
            loaded=self._collector.loaded,
            adapter_read=self.adapters.ended,
            check_device=self._check_device,
            outlives=left is not None,
        )
        self.journal = StepJournal(journal, self.lifecycle.first_steps)
        self.preparer = None if memory is None else Preparer(memory, self.models.chunks, tier)
        self.idle_work = IdleWork(self.models, self._collector, self.preparer, self.lifecycle, self.journal)
        self.constraints = Constraints(runner)
        self.expert_news = ExpertNews(self.models, channel.send)
        self.num_steps = 0
        self._under_way: deque[StepUnderWay] = deque()  # steps that were launched, the oldest first
        self._model_of: dict[int, str] = {}
        self._stats_dirty, self._stats_sent_s, self._shutdown = True, 0.0, False
        self.groups: GroupSteps | None = None
        if membership is not None:
            self.groups = GroupSteps(*membership, self.models, self.journal, self._followed, runner.compute_threads)

    def run(self, first_messages: Iterable[Any] = ()) -> None:
        """Runs the engine's loop until the channel is closed or Shutdown arrives. first_messages: messages that arrived together
        with Configure."""
        self._collector.start()
        poller = select.epoll()
        lifecycle_fd, constraints_fd = self.lifecycle.fileno(), self.constraints.fileno()
        poller.register(self.channel.fileno(), select.EPOLLIN)
        poller.register(lifecycle_fd, select.EPOLLIN)
        poller.register(constraints_fd, select.EPOLLIN)
        if (groups := self.groups) is not None:
            poller.register(groups.fileno(), select.EPOLLIN)
            groups.watch(self.channel.fileno())
        watching_out = has_followed = False
        try:
            self.channel.send(EngineReady(os.getpid(), PROTOCOL_VERSION, self.configure.num_chunks, list(self.models.chunks.left)))
            for message in first_messages:
                self._handle(message)
            while not self._shutdown:
                if groups is not None:
                    has_followed |= groups.run_queue()
                stalled = self.channel.backlog_bytes > MAX_BACKLOG_BYTES
                busy = [] if stalled else self.models.busy()
                if watching_out != (self.channel.backlog_bytes > 0):
                    watching_out = not watching_out
                    poller.modify(self.channel.fileno(), select.EPOLLIN | (select.EPOLLOUT if watching_out else 0))
                runs = bool(busy or self._under_way)
                more_comes = groups is not None and (groups.is_waiting or (has_followed and not runs and groups.comes_soon()))
                has_followed = groups is not None and more_comes and not runs and groups.run_queue()
                follows = groups is not None and not runs and not more_comes and not groups.has_ended()
                if not runs and not more_comes and not follows:
                    self.journal.nothing_runs()
                wait_s = 0.0 if runs or more_comes else self._idle_wait_s()
                most_s = ASK_EVERY_S if follows else BEAT_EVERY_S
                self.journal.beat(Doing.TURN if wait_s == 0.0 else Doing.IDLE)
                ready = poller.poll(most_s if wait_s is None else min(wait_s, most_s))
                for fd, events in ready:
                    self.journal.beat(Doing.TURN)
                    if fd == lifecycle_fd:
                        self._finish_launched()
                        self.lifecycle.take()
                        self._stats_dirty = True
                    elif fd == constraints_fd:
                        self._finish_launched()
                        self._end_constrained(self.constraints.receive())
                    elif groups is not None and fd == groups.fileno():
                        groups.awake()
                    else:
                        if events & select.EPOLLOUT:
                            self.channel.flush()
                        if events & ~select.EPOLLOUT:
                            for message in self.channel.receive():
                                self._handle(message)
                if self.constraints.stalled():
                    self._finish_launched()
                    self._end_constrained(self.constraints.restart_stalled())
                    busy = busy and self.models.busy()
                if self.adapters.by_model:
                    self._look_after_adapters()
                if self.lifecycle.first_steps:
                    self._start_first_steps()
                if self.preparer is not None and (busy or ready):
                    self.preparer.disturbed()
                if busy:
                    self._turn(self.models.busy() if ready else busy)
                elif self._under_way:
                    self._end_oldest()
                elif not ready and wait_s is not None and not more_comes and not (follows and wait_s > most_s):
                    self._idle()  # nothing runs, and nothing arrived for so long
        except ChannelClosed:
            log.info("the daemon is gone")
        finally:
            if groups is not None:
                groups.leave_all()
            poller.close()

    # ---- steps

    def _turn(self, busy: list[str]) -> None:
        """Starts one step of the busy model whose turn (time slice) it is; if that model has no step to run, of the next model, and
        so on. If no model has one, waits for the result of the oldest step under way. busy: the models that may have a step to run.

        A model without a step to run, and without steps under way, no longer counts as busy. A model whose steps are all in other
        stages of a pipeline still counts as busy: it is asked again after each step of another model, so these steps must not take
        longer than turns allow."""
        asked = busy
        while asked and (name := self.models.next(asked)) is not None:
            if self._step(name, busy):
                return
            asked = [other for other in asked if other != name]
            if not any(step.served.spec.model == name for step in self._under_way):
                busy = [other for other in busy if other != name]
        if self._under_way:
            self._end_oldest()

    def _step(self, name: str, busy: list[str]) -> bool:
        """Starts one step of a model. Then waits for results of the model's steps under way (launched, without a result yet), the
        oldest first, until no more are under way than the model allows (ServedModel.most_under_way). Returns False if it could
        neither start a step nor process a result: the model has no step to run, or its steps are in other stages of a pipeline
        while other models are busy. busy: the models that share the device's time."""
        embedder = self.models.embedders.get(name)
        if embedder is not None:
            self._end_on_device()
            self._embed(name, embedder, others_busy=self.models.num_sharing(busy) > 1)
            return True
        served = self.models.by_name[name]
        if served.most_under_way == 0:
            self._end_on_device()
        own = [step for step in self._under_way if step.served is served]
        ended = served.share is not None and len(own) > served.most_under_way  # each stage has a step already
        if ended and not self._end_up_to(own[0], busy):
            return False
        plan = self._plan(name, served, busy)
        if plan is None and own and not ended:
            if not self._end_up_to(own[0], busy):
                return False
            # The next step is posted at once: other stages compute it while this device has other models' turns.
            ended, plan = True, None if served.share is None else self._plan(name, served, busy)
        if plan is None:
            return ended
        if not self._start(name, served, plan):
            return True
        while len(own := [step for step in self._under_way if step.served is served]) > served.most_under_way:
            if (ended and len(busy) > 1) or not self._end_up_to(own[0], busy, noted=True):
                break
        return True

    def _plan(self, name: str, served: ServedModel, busy: list[str]) -> BatchPlan | None:
        """Returns the plan of a model's next step; None if the model has no step to run, or if the next step depends on results of
        steps under way. busy: the models that share the device's time."""
        if served.is_broken:  # it may have lost a device since it was found busy
            return None
        scheduler = served.scheduler
        constrained = name in self.constraints.concerned
        if constrained:
            self._end_constrained(self.constraints.ready(served))
        room = self.models.room_of(served, busy)
        try:
            plan = scheduler.plan(self.num_steps + 1, room, now_s=time.monotonic())
        except TokensNeeded:
            plan = None
        served.backlogged = room.backlogged
        if scheduler.failed:
            self._fail_hopeless(scheduler)
        self.models.discard_returned()
        return plan

    def _start(self, name: str, served: ServedModel, plan: BatchPlan) -> bool:
        """Starts a planned step. Returns True if the step is now under way, so that its result has to be waited for; False if it
        has ended already or could not be started."""
        scheduler, constrained = served.scheduler, name in self.constraints.concerned
        self.num_steps += 1
        posted: PostedStep | None = None
        if served.share is not None and self.groups is not None:
            try:
                posted = self.groups.post(served.share, plan, scheduler.table)
            except GroupBroken as error:
                self._broke(served.share, error)
                return False
        request_ids, expected_s = scheduler.table.request_id[plan.slots], served.limits.expected_s(plan)
        if posted is None and served.ahead is None:
            self.journal.note(request_ids, expected_s)
            masks = self.constraints.masks(served, plan) if constrained else None
            result = self.models.threads.run(lambda: served.hosted.execute(plan, scheduler.table, masks))
            self._take_in(served, plan, masks, result)
            return False
        self._note_with_those_under_way(request_ids, expected_s)
        masks = self.constraints.masks(served, plan) if constrained else None
        launched: Launched
        if posted is not None:
            launched, posted.masks = posted, masks
        else:
            assert served.ahead is not None
            try:
                launched = served.ahead.launch(plan, scheduler.table, masks)
            except NoWorkSpace as error:
                self._give_up(served, request_ids.tolist(), str(error))
                return False
        if served.most_under_way:
            scheduler.start_step(plan)
        self._under_way.append(StepUnderWay(served, plan, masks, launched, request_ids, expected_s))
        return True

    def _note_with_those_under_way(self, request_ids: LongArray, expected_s: float) -> None:
        """Writes a step's requests to the journal, together with those of all steps under way of models that are not split. Devices
        report faults late, so a fault may come from any of these steps. A step of a split model is noted when this device begins
        its part of it. expected_s: usual seconds of the step; 0.0 if not known."""
        known = expected_s > 0.0
        for step in self._under_way:
            if step.served.share is not None:
                continue
            request_ids, known = np.union1d(step.request_ids, request_ids), known and step.expected_s > 0.0
            expected_s += step.expected_s
        self.journal.note(request_ids, expected_s if known else 0.0)

    def _broke(self, share: GroupShare, error: GroupBroken) -> None:
        """Drops the requests of a split model that has lost one of its devices. No message about the requests is sent: the daemon
        still has them, as it has those of an evicted model. share: this device's share of the model. error: the exception by which
        the loss was noticed."""
        broke(share, error)
        self._under_way = deque(step for step in self._under_way if step.served.share is not share)
        if self.groups is not None:
            self.groups.forget(share)
        self._forget(share.name)
        self._stats_dirty = True

    def _followed(self, name: str) -> None:
        self.num_steps += 1
        self._stepped(name)

    def _give_up(self, served: ServedModel, request_ids: list[int], why: str) -> None:
        """Fails the requests of a step that could not be started for lack of memory (`why`); all other requests go on."""
        self._finish_launched()
        for request_id in request_ids:
            if request_id in self._model_of:  # else it ended with the step before
                served.scheduler.abort(request_id)
                self._fail_request(request_id, "no_work_space", f"model {served.spec.model}: {why}")
        self._stats_dirty = True

    def _finish_launched(self) -> None:
        """Waits for all launched steps and processes their results; afterwards no step that this engine leads runs."""
        while self._under_way:
            self._end_oldest()

    def _end_on_device(self) -> None:
        """Waits for all steps under way that only this device computes, and processes their results. Afterwards nothing runs on the
        device, except steps of split models that other engines lead."""
        while steps := [step for step in self._under_way if step.served.share is None]:
            self._end(steps[0])

    def _end_up_to(self, last: StepUnderWay, busy: list[str], noted: bool = False) -> bool:
        """Waits for the step under way `last` and those before it, the oldest first, processes their results and returns True. If
        only this device computes `last`, steps of split models are passed over. Returns False without waiting, if other models are
        busy and this device cannot compute its part of `last` yet (StepUnderWay.waits). busy: the models that share the device's
        time. noted: whether the journal already has the requests and the expected time of these steps."""
        if len(busy) > 1 and last.waits:
            return False
        step: StepUnderWay | None = None
        while step is not last:
            step = next(each for each in self._under_way if last.served.share is not None or each.served.share is None)
            self._end(step, noted)
        return True

    def _end_oldest(self) -> None:
        """Waits for the oldest step under way and processes its result."""
        self._end(self._under_way[0])

    def _end(self, step: StepUnderWay, noted: bool = False) -> None:
        """Waits for a step under way and processes its result. noted: whether the journal already has the requests and the expected
        time of this step and those after it."""
        self._under_way = deque(each for each in self._under_way if each is not step)
        if step.served.share is not None and (self._under_way or not noted):  # this device's part of it begins now
            self._note_with_those_under_way(step.request_ids, step.expected_s)
        elif not noted:
            self.journal.beat(Doing.STEP, step.expected_s)
        try:
            result = step.launched.wait()
        except GroupBroken as error:
            assert step.served.share is not None
            self._broke(step.served.share, error)
            return
        self._take_in(step.served, step.plan, step.masks, result)

    def _take_in(self, served: ServedModel, plan: BatchPlan, masks: RowMasks | None, result: StepResult) -> None:
        """Passes the result of a step that has ended to the scheduler, and the step's tokens to the daemon. masks: the masks by
        which the step has sampled; None: there were none."""
        name, scheduler = served.spec.model, served.scheduler
        self.models.charge(served, plan, result.seconds, result.proposed, result.waited_s)
        for told in result.prompt_logprobs:
            self.channel.send(told)
        asked = scheduler.table.request_id[plan.slots[plan.samples]] if served.hosted.embeds else NO_REQUESTS
        outcome = scheduler.finish_step(plan, result.ids, result.bad)
        if result.proposed is not None:
            scheduler.take_proposals(result.proposed.slots, result.proposed.counts, result.proposed.tokens)
        if masks is not None:
            self.constraints.sampled(served, masks, outcome)
        if outcome.request_ids:
            self.channel.send(answer(served, plan, result, outcome, asked))
            for request_id in compress(outcome.request_ids, outcome.finish):
                del self._model_of[request_id]
        for request_id in outcome.bad:
            del self._model_of[request_id]
            what = "the vector is" if served.hosted.embeds else "logits are"
            self.channel.send(RequestFailed(request_id, "nan_logits", f"model {name}: {what} not finite"))
        self._stepped(name)
        captures = self.models.to_capture_between(served, plan)
        if captures is not None:
            self.journal.beat(Doing.CAPTURE)
            captures.capture_next()

    def _start_first_steps(self) -> None:
        """Starts those first steps (of models whose weights are still arriving) that can begin now."""
        for first in self.lifecycle.first_steps.values():
            if first.can_start and self.lifecycle.start(first, self.num_steps + 1) is not None:
                self.num_steps += 1
                self.journal.name(NO_REQUESTS)
            if first.served.scheduler.failed:
                self._fail_hopeless(first.served.scheduler)

    def _resume(self, first: FirstStep) -> None:
        """Processes the result of a model's first step that has ended. The step has no result if it failed because the weights have
        to be read again. Then processes the messages that were deferred while the step ran."""
        deferred, first.deferred = first.deferred, []
        if first.plan is not None and first.result is not None:
            self._take_in(first.served, first.plan, None, first.result)
        for message in deferred:
            self._handle(message)

    def _look_after_adapters(self) -> None:
        """Continues the loads of adapters that requests or an operator wait for. Skips a model while its first step runs, because
        that step uses the model's adapters in a thread of its own."""
        first_steps = self.lifecycle.first_steps.values()
        held = (first.served for first in first_steps if not first.running)
        waiting = [served for served in (*self.models.by_name.values(), *held) if self.adapters.is_wanted(served)]
        if waiting or self.adapters.under_way:
            self.adapters.look_after(waiting, self.lifecycle.may_free_memory)

    def _embed(self, name: str, embedder: Embedder, others_busy: bool) -> None:
        request_ids = embedder.next_texts(others_busy)
        self.num_steps += 1
        self.journal.note(np.array(request_ids, np.int64), embedder.expected_s(request_ids))
        out, failed = self.models.threads.run(lambda: embedder.step(request_ids, self.num_steps))
        self.models.turns.charge(name, out.seconds)
        for request_id in request_ids:
            del self._model_of[request_id]
        self.channel.send(out)
        for failure in failed:
            self.channel.send(failure)
        self._stepped(name)

    def _stepped(self, name: str) -> None:
        """Sends the reports that are due after a step: statistics, and the counts of tokens that experts have computed. Collects
        garbage if that is overdue. name: the step's model."""
        self._stats_dirty = True
        self.expert_news.stepped(name)
        now = time.monotonic()
        if now - self._stats_sent_s >= STATS_EVERY_S:
            self._send_stats(now)
        if self._collector.overdue(self.num_steps):
            self._collector.collect(self.num_steps, busy=True)

    def _end_constrained(self, ends: list[End]) -> None:
        for end in ends:
            del self._model_of[end.request_id]
            if end.error:
                self.channel.send(RequestFailed(end.request_id, end.code, f"model {end.model}: {end.error}"))
            else:
                self.channel.send(TokensOut(end.model, self.num_steps, 0.0, [end.request_id], [], [0], [FINISH_STOP], steps=0))
            self._stats_dirty = True

    def _fail_request(self, request_id: int, code: str, error: str) -> None:
        """Drops the records of a request that is no longer in the batch scheduler, and tells the daemon that it has failed. code,
        error: as in RequestFailed."""
        self.constraints.drop(self._model_of.pop(request_id), request_id)
        self.channel.send(RequestFailed(request_id, code, error))
        self._stats_dirty = True

    def _fail_hopeless(self, scheduler: BatchScheduler) -> None:
        for request_id, why in scheduler.failed:
            self._fail_request(request_id, "too_long", why)
        scheduler.failed.clear()
        self._stats_dirty = True

    # ---- idle

    def _idle_wait_s(self) -> float | None:
        """Returns how many seconds the loop may sleep, if no message arrives, before there are statistics to send or idle work to
        do; None if there is neither."""
        now = time.monotonic()
        if self._stats_dirty:
            return max(0.0, self._stats_sent_s + STATS_EVERY_S - now)
        waits_s = [one for one in (self.expert_news.wait_s(now), self.idle_work.wait_s(self.num_steps)) if one is not None]
        return min(waits_s, default=None)

    def _idle(self) -> None:
        """Does the first of these that is due while nothing runs: sends statistics, sends the counts of tokens that experts have
        computed, or does a part of the idle work."""
        now = time.monotonic()
        if self._stats_dirty:
            self._send_stats(now)
        elif self.expert_news.wait_s(now) == 0.0:
            self.expert_news.tell(now, wait=True)
        elif self.idle_work.wait_s(self.num_steps) is not None:
            self.idle_work.step(self.num_steps)

    def _send_stats(self, now: float) -> None:
        self._stats_dirty = False
        self._stats_sent_s = now
        self.channel.send(self.models.stats(self.num_steps))
        self.expert_news.tell(now, wait=False)

    # ---- messages

    def _handle(self, message: Any) -> None:
        self.journal.beat(Doing.TURN)
        if type(message) is not Submit:  # any other message changes something that a step under way relies on
            self._finish_launched()
        match message:
            case Submit():
                self._submit(message)
            case Abort():
                for request_id in message.request_ids:
                    if any(first.abort(request_id) for first in self.lifecycle.first_steps.values()):
                        continue
                    name = self._model_of.pop(request_id, None)
                    if name in self.models.embedders:
                        self.models.embedders[name].abort(request_id)
                    elif name is not None:
                        first = self.lifecycle.first_steps.get(name)
                        (first.served if first is not None else self.models.by_name[name]).scheduler.abort(request_id)
                        self.constraints.drop(name, request_id)
            case LoadModel():
                self.lifecycle.load(message)
            case EvictModel():
                self.expert_news.tell_last(message.model)
                self.lifecycle.evict(message)
            case SetLease():
                self.models.set_lease(message.lease_chunks)
            case BringAdapter():
                first = self.lifecycle.first_steps.get(message.model)
                served = self.models.by_name.get(message.model) if first is None else first.served
                if served is not None:
                    self.adapters.bring(served, message.adapter)
            case RetireAdapter():
                # a model with a first step keeps the adapter until something needs its memory
                if message.model in self.models.by_name and message.model not in self.lifecycle.first_steps:
                    self.adapters.retire(self.models.by_name[message.model], message.adapter)
            case Probe():
                self._check_device(message.number)
                self.channel.send(Probed(message.number))
            case Shutdown():
                self._shutdown = True
            case _:
                raise RuntimeError(f"unexpected message {type(message).__name__}")
        self._stats_dirty = True

    def _submit(self, message: Submit) -> None:
        request_id = message.request_id
        embedder = self.models.embedders.get(message.model)
        is_for_encoders = message.task in (EMBED, SCORE)
        if embedder is not None and is_for_encoders and request_id not in self._model_of:
            why_not = embedder.submit(message)
            if why_not:
                self.channel.send(RequestFailed(request_id, "internal", why_not))
                return
            self.models.turns.set_weight(message.model, message.weight if message.weight > 0 else 1.0)
            self._model_of[request_id] = message.model
            return
        first = self.lifecycle.first_steps.get(message.model)
        if first is not None and first.put_aside(message):
            return
        served = self.models.by_name.get(message.model) if first is None else first.served
        if served is not None and served.is_broken:  # sent before the daemon knew that the group is broken
            return
        embeds = served is not None and served.hosted.embeds
        if embedder is not None or (served is not None and message.task != (EMBED if embeds else "generate")):
            text = f"model {message.model} does not do task {message.task}"
            self.channel.send(RequestFailed(request_id, "internal", text))
            return
        if served is None:
            self.channel.send(RequestFailed(request_id, "unknown_model", f"model {message.model} is not loaded"))
            return
        if request_id in self._model_of:
            self.channel.send(RequestFailed(request_id, "internal", f"request {request_id} is here already"))
            return
        if message.adapter is not None:
            if why_not := self.adapters.why_not(served):
                self.channel.send(RequestFailed(request_id, "adapter_unusable", f"adapter {message.adapter.name}: {why_not}"))
                return
            self.adapters.expect(served)
        if embeds:
            message = msgspec.structs.replace(message, params=VECTOR_PARAMS)
        request = batch_request(message, served.spec, served.hosted.vocab_size)
        if request is None:  # it was submitted again after a crash and already has all its tokens
            self.channel.send(TokensOut(message.model, self.num_steps, 0.0, [request_id], [], [0], [FINISH_LENGTH], steps=0))
            return
        if isinstance(request, RequestFailed):
            self.channel.send(request)
            return
        weight = message.weight if message.weight > 0 else 1.0
        if first is None:
            self.models.turns.set_weight(message.model, weight)
        else:
            first.weight = weight
        self._model_of[request_id] = message.model
        if message.params.is_constrained:
            self._end_constrained(self.constraints.submit(served, request, message.params, message.output, message.text_id))
        else:
            served.scheduler.submit(request)

    def _check_device(self, number: int = 0) -> None:
        """Raises the device's error if the device does not compute the token `number` of a probe."""
        self.journal.nothing_runs()  # no request is to blame if the device fails now
        self._probe(number)

    def _forget(self, name: str) -> None:
        """Drops the loop's records of the requests and adapters of a model that is evicted."""
        self._model_of = {request: model for request, model in self._model_of.items() if model != name}
        self.constraints.close(name)
        self.adapters.forget(name)
        self._collector.thaw_later()
