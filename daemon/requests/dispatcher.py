"""Carries out the node scheduler's decisions. Requests arrive here; messages from engines arrive through engine_events."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from config.schema import NodeConfig
from daemon.contracts import Expectation, Generation
from daemon.errors import HearthError, NotNow, ServerFault, from_refusal
from daemon.metrics.counters import Metrics
from daemon.models.entry import LoadSource, ModelEntry
from daemon.process.logs import fields
from daemon.process.loop_watch import LoopWatch
from daemon.record.event_ring import EventRing
from daemon.requests.open_requests import OpenRequests
from daemon.requests.prefix_index import PrefixIndex
from engine import protocol
from engine.exchange import GroupForm
from scheduler.node import actions, events, residency
from scheduler.node.groups import joined

if TYPE_CHECKING:
    from daemon.traces.sequence_trace import FinishedLoad
    from daemon.traces.tracer import Tracer

log = logging.getLogger("hearthd")
_NOTHING_EXPECTED = Expectation(0, lambda: None)
_GRANTS_LEASE = (protocol.LoadModel, protocol.EvictModel, protocol.SetLease)


class EnginePort(Protocol):
    """The part of an engine's supervisor (daemon/engines/workers.py) that the dispatcher uses: it sends messages to the engine and
    restarts it."""

    def send(self, message: protocol.Message) -> None: ...

    def restart_stuck(self, reason: str) -> None: ...


class GroupsPort(Protocol):
    """The part of daemon/engines/groups.py that the dispatcher uses: it loads and evicts models that are split over several
    devices."""

    def knows(self, placement_id: int) -> bool: ...

    def load(self, action: actions.Load, message: protocol.LoadModel, form: GroupForm) -> None: ...

    def evict(self, action: actions.Evict) -> None: ...


class SchedulerPort(Protocol):
    """The part of scheduler.node.NodeScheduler that the dispatcher uses. `handle` takes an event and returns the actions that it
    leads to."""

    def handle(self, event: events.Event) -> list[actions.Action]: ...

    def next_deadline(self) -> float | None: ...

    def state(self, name: str) -> str | None: ...

    def has_engines(self, name: str) -> bool: ...

    def why(self, name_or_request: str) -> list[str]: ...

    def gate(self) -> actions.Refusal | None: ...


class _Expected(NamedTuple):
    """A request that has been announced to the scheduler while its prompt is tokenized. model: the model's name. loads: loads of
    the model that have ended meanwhile; [] while tracing is off."""

    model: str
    loads: list[FinishedLoad]


class _Failed(NamedTuple):
    """A request that has ended with an error, which must still be reported: to the caller that submitted it, or to its sink (the
    object that receives its tokens)."""

    generation: Generation
    error: HearthError


class Dispatcher:
    """Takes requests from the API, gives the node scheduler events, and carries out the actions that it decides on: messages to
    engines, ends of requests. It implements RequestPort (daemon/contracts.py). All calls must come from the event loop."""

    def __init__(
        self,
        scheduler: SchedulerPort,
        config: NodeConfig,
        source: Callable[[str], LoadSource | None],
        ring: EventRing,
        metrics: Metrics,
        watch: LoopWatch,
    ) -> None:
        """source: returns the files and settings of a registered model, or None if its folder was removed. ring: keeps events for
        operators. watch: measures how long the event loop is held."""
        self.scheduler, self.config, self.ring, self.metrics = scheduler, config, ring, metrics
        self.engines: dict[str, EnginePort] = {}
        self.groups: GroupsPort | None = None  # set by the node
        self._leases: dict[str, int] = {}  # device -> the lease that was last sent to its engine
        self.open = OpenRequests(metrics, watch, lambda: self.config.request_timeout_s, self._timed_out)
        self.loading: dict[str, str] = {}  # device, or the joined name of several -> the model that was last loaded there
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._causes = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[actions.Refusal | None]] = {}  # cause -> result of its command
        self.why_slow: Callable[[], str] = lambda: ""  # returns a sentence for requests that have waited too long
        self.tracer: Callable[[], Tracer | None] = lambda: None  # returns the tracer, None while tracing is off
        self.load_begins: Callable[[ModelEntry], None] = lambda entry: None  # called when an engine is told to load a model
        self._prefixes = PrefixIndex()
        self.open.on_end = self._note_output
        self.note_decisions: Callable[[], None] = lambda: None  # called after each event, before its actions are carried out
        self._expected: dict[int, _Expected] = {}  # by request_id
        self._pending: deque[events.Event] = deque()
        self._busy = False
        self._hold_aborts = False
        self._aborts: dict[str, list[int]] = {}
        self._deadline_s: float | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._carry: dict[type[actions.Action], Callable[[Any], _Failed | None]] = {
            actions.Load: self._load,
            actions.Evict: self._evict,
            actions.RequestsPaused: self._paused,
            actions.GrantLease: self._grant_lease,
            actions.Submit: self._submit,
            actions.Reject: self._reject,
            actions.AbortInEngine: self._abort,
            actions.RestartEngine: self._restart_engine,
            actions.StateChanged: self._state_changed,
            actions.CommandDone: self._command_done,
        }

    # ---- RequestPort

    def submit(self, generation: Generation) -> None:
        request_id = generation.request_id or next(self._ids)
        now = time.monotonic()
        generation.request_id, generation.arrived_s = request_id, now
        model = generation.model.name
        self.open.add(generation)
        if generation.trace is not None:
            generation.trace.accepted(now)
            if (expected := self._expected.get(request_id)) is not None:
                for load in expected.loads:
                    generation.trace.loaded_before(load)
        facts = events.RequestFacts(
            request_id=request_id,
            model=model,
            num_prompt_tokens=len(generation.prompt),
            max_tokens=generation.params.max_tokens,
            tenant=generation.tenant,
            weight=generation.weight,
            priority=generation.priority,
            keep_alive_s=generation.keep_alive_s,
            part_of=generation.first.request_id if generation.first is not None else 0,
            was_accepted=generation.was_accepted,
            cached=self._cached(generation) if generation.model.has_replicas else (),
        )
        refused = self._run(events.RequestArrived(now=now, cause=f"req-{request_id}", request=facts), generation)
        if refused is not None:
            raise refused
        self.open.accepted(generation)
        if generation.trace is not None and generation.trace.waits:
            generation.trace.waits_for("; ".join(self.scheduler.why(f"req-{request_id}")[1:]))

    def expect(self, model: ModelEntry, tenant: str = "") -> Expectation:
        name = model.name
        if self.scheduler.state(name) not in (residency.COLD, residency.WARM):
            return _NOTHING_EXPECTED
        request_id = next(self._ids)
        cause = f"req-{request_id}"

        def over() -> None:
            self._expected.pop(request_id, None)
            self.post(events.ExpectationOver(now=time.monotonic(), cause=cause, model=name, expectation=cause))

        self._expected[request_id] = _Expected(name, [])
        self.post(events.RequestExpected(now=time.monotonic(), cause=cause, model=name, tenant=tenant))
        return Expectation(request_id, over)

    def cancel(self, generation: Generation) -> None:
        if self.open.by_id.get(generation.request_id) is not generation:
            return
        # inside a step, the caller is a sink that found a stop string; otherwise the client is gone
        self.open.end(generation, "stop" if self._hold_aborts else "cancelled")
        self._cancelled(generation.request_id)

    def forward(self, generation: Generation) -> None:
        if (refusal := self.scheduler.gate()) is not None:
            raise from_refusal(refusal)
        generation.request_id, generation.arrived_s = next(self._ids), time.monotonic()
        self.open.add(generation)
        self.open.accepted(generation)

    def forwarded(self, generation: Generation, outcome: str) -> None:
        if self.open.by_id.get(generation.request_id) is generation:
            self.open.end(generation, outcome)

    def keep_alive(self, model: ModelEntry, seconds: float) -> None:
        cause = self.next_cause("keep_alive")
        self.post(events.KeepAliveSet(now=time.monotonic(), cause=cause, model=model.name, keep_alive_s=seconds))

    # ---- commands

    def next_cause(self, kind: str) -> str:
        return f"{kind}-{next(self._causes)}"

    def command(self, make: Callable[[float, str], events.Event], kind: str = "cli") -> asyncio.Future[actions.Refusal | None]:
        """Makes the scheduler handle the event of an operator's command. Returns a future that gets None when the command is done,
        or the refusal. make: returns the event; it is called with the time (monotonic seconds) and a cause, a text that identifies
        the command in events and logs. kind: the first part of that text."""
        cause = self.next_cause(kind)
        future: asyncio.Future[actions.Refusal | None] = self._loop.create_future()
        self._waiting[cause] = future
        future.add_done_callback(lambda _: self._waiting.pop(cause, None))
        self.post(make(time.monotonic(), cause))
        return future

    def fail_all(self, error: HearthError) -> int:
        """Ends every open request with `error` and returns how many there were."""
        left = list(self.open.by_id.values())
        for generation in left:
            self.fail(generation, error, "failed")
            self._cancelled(generation.request_id)
        return len(left)

    # ---- events and actions

    def post(self, event: events.Event) -> None:
        """Makes the scheduler handle an event, and carries out the actions that it decides on, in order. If another event is posted
        meanwhile, for example because a sink cancels its request, it is handled after these actions."""
        self._run(event, None)

    def _run(self, event: events.Event, arriving: Generation | None) -> HearthError | None:
        """Makes the scheduler handle an event and carries out its actions. arriving: the request whose arrival is the event, or
        None. If that request is refused at once, returns the error, and does not report it to the request's sink; otherwise returns
        None. While an earlier event is being handled, the event is only queued."""
        self._pending.append(event)
        if self._busy:
            return None
        self._busy = True
        refused = None
        try:
            while self._pending:
                for generation, error in self._handle(self._pending.popleft()):
                    if generation is arriving:
                        refused = error
                    else:
                        generation.sink.failed(error)
        finally:
            self._busy = False
        if self._aborts and not self._hold_aborts:
            self._flush_aborts()
        self._arm_deadline()
        return refused

    def _handle(self, event: events.Event) -> Iterator[_Failed]:
        """Makes the scheduler handle one event and carries out the actions that it decides on. Yields each request that an action
        ends with an error. If the scheduler itself raises an exception, it is logged, and the request or command of the event
        fails."""
        try:
            decided = self.scheduler.handle(event)
        except Exception:
            # one bad event must not stop the node, and its request must not hang
            self.metrics.scheduler_errors += 1
            log.exception("the node scheduler failed on %s", event)
            if isinstance(event, events.RequestArrived) and (lost := self.open.by_id.get(event.request.request_id)) is not None:
                fault = ServerFault("internal", "The node scheduler failed on this request; see the log.")
                yield self._failed(lost, fault, "failed")
            elif (command := self._waiting.get(event.cause)) is not None and not command.done():
                command.set_exception(ServerFault("internal", "The node scheduler failed on this command; see the log."))
            return
        self.note_decisions()
        for action in decided:
            failed = self._carry[type(action)](action)
            if failed is not None:
                yield failed

    def _arm_deadline(self) -> None:
        deadline_s = self.scheduler.next_deadline()
        if deadline_s == self._deadline_s:
            return
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        self._deadline_s = deadline_s
        if deadline_s is not None:
            # a relative time, because the loop's clock may lag behind the monotonic clock by its resolution
            self._deadline_timer = self._loop.call_later(max(0.0, deadline_s - time.monotonic()), self._deadline_reached)

    def _deadline_reached(self) -> None:
        now = max(time.monotonic(), self._deadline_s or 0.0)
        self._deadline_timer, self._deadline_s = None, None
        self.post(events.TimePassed(now=now, cause="time"))
        if self._deadline_s is not None and self._deadline_s <= now and self._deadline_timer is not None:
            # if the deadline stays in the past, an immediate timer would keep the loop busy
            self._deadline_timer.cancel()
            self._deadline_timer = self._loop.call_later(0.05, self._deadline_reached)

    def _load(self, action: actions.Load) -> None:
        source = self._source(action.model)
        if source is None:
            self._load_impossible(action, "its folder is gone", permanent=True)
            return
        entry = source.entry
        self.metrics.swaps.load_sent(action)
        if action.source_slots and action.fingerprint != entry.fingerprint:
            self._load_impossible(action, "its files have changed just now", permanent=False)
            return
        self.loading[joined(action.leases)] = action.model
        self.load_begins(entry)
        if (tracer := self.tracer()) is not None:
            tracer.load_sent(action, action.weights_chunks * int(self.config.chunk_bytes), time.monotonic())
        message = protocol.LoadModel(
            placement_id=action.placement_id,
            model=action.model,
            path=source.path,
            dtype=source.dtype,
            fingerprint=entry.fingerprint,
            weights_chunks=action.weights_chunks,
            kv_reserved_chunks=action.kv_reserved_chunks,
            lease_chunks=action.lease_chunks,
            max_model_len=entry.max_model_len,
            max_sequences=entry.max_sequences,
            eos_token_ids=list(entry.eos_token_ids),
            quantize=source.quantize,
            source_slots=list(action.source_slots),
            checksum=action.checksums[0] if action.checksums else 0,
            keep_slots=list(action.keep_slots),
            kv_slots=list(action.kv_slots),
            kv_index=action.kv_index,
            kv_cache_dtype=source.kv_cache_dtype,
            speculator=entry.speculator,
            head_path=entry.head_path,
        )
        if not action.further:
            self.send(action.device, message)
            return
        try:
            assert self.groups is not None
            assert source.form is not None
            division = source.form.division._replace(copies=action.expert_copies)
            self.groups.load(action, message, source.form._replace(division=division))
        except (OSError, MemoryError) as error:
            self._load_impossible(action, f"parallel: {error}", permanent=False)

    def _load_impossible(self, action: actions.Load, reason: str, permanent: bool) -> None:
        self.post(
            events.LoadFailed(
                now=time.monotonic(),
                cause=action.cause,
                placement_id=action.placement_id,
                reason=reason,
                permanent=permanent,
            )
        )

    def _evict(self, action: actions.Evict) -> None:
        self.metrics.evictions[action.model] += 1
        self.metrics.swaps.evict_sent(action)
        if (tracer := self.tracer()) is not None:
            self.tell_load(tracer.load_ended(action.placement_id, time.monotonic(), error=f"given up: {action.reason}"))
        if self.groups is not None and self.groups.knows(action.placement_id):
            self.groups.evict(action)
            return
        self.send(
            action.device,
            protocol.EvictModel(
                placement_id=action.placement_id,
                model=action.model,
                lease_chunks=action.lease_chunks,
                save_slots=list(action.save_slots),
            ),
        )

    def _paused(self, action: actions.RequestsPaused) -> None:
        now = time.monotonic()
        self.metrics.swaps.paused_requests[action.model] += len(action.request_ids)
        for request_id in action.request_ids:
            generation = self.open.by_id.get(request_id)
            if generation is not None:
                generation.num_pauses += 1
                generation.pause(now)
                if generation.trace is not None:
                    generation.trace.paused(generation, now, action.cause)
        about = fields(model=action.model, cause=action.cause)
        log.info("%d requests are paused: their model makes room", len(action.request_ids), extra=about)
        self.ring.add("paused", model=action.model, requests=len(action.request_ids), cause=action.cause)

    def engines_changed(self) -> None:
        """Updates the pauses of all paused requests after the start or end of an engine. A pause does not count for
        request_timeout_s while enough engines are up for the request's model, but counts while there are too few. (A request whose
        device is lost would otherwise wait without limit.)"""
        now = time.monotonic()
        for generation in self.open.by_id.values():
            if generation.is_paused:
                has_engines = self.scheduler.has_engines(generation.model.name)
                (generation.pause if has_engines else generation.count_pause)(now)

    def _grant_lease(self, action: actions.GrantLease) -> None:
        self.send(action.device, protocol.SetLease(lease_chunks=action.lease_chunks))

    def _submit(self, action: actions.Submit) -> None:
        generation = self.open.by_id.get(action.request_id)
        if generation is None:
            return  # the request has ended meanwhile; its RequestCancelled or RequestFinished follows
        now = time.monotonic()
        if generation.submitted_device:
            self.metrics.resubmitted += 1
            generation.resume(now)
        else:
            generation.submitted_s = now
            self.metrics.submitted(generation)
        generation.submitted_device, generation.replica = action.device, action.model
        if generation.model.has_replicas:
            self._note_prefix(generation)
        if generation.trace is not None:
            generation.trace.submitted(generation, now)
        self.send(
            action.device,
            protocol.Submit(
                request_id=action.request_id,
                model=action.model,
                prompt=generation.prompt,
                params=generation.params,
                output=generation.output,
                tenant=generation.tenant,
                cache_salt=generation.cache_salt,
                priority=generation.priority,
                task=generation.task,
                weight=self._weight(generation.model.name),
                tenant_weight=generation.weight,
                prediction=generation.prediction,
                second_at=generation.second_at,
                adapter=_adapter_source(generation.model),
                text_id=generation.model.text_id if generation.params.grammar else "",
            ),
        )

    def _weight(self, model: str) -> float:
        config = self.config.models.get(model)
        return config.priority if config is not None else 1.0

    def _reject(self, action: actions.Reject) -> _Failed | None:
        generation = self.open.by_id.get(action.request_id)
        if generation is None:
            return None  # the request has ended meanwhile
        refusal = action.refusal
        if refusal.code == "wait_exceeded" and (slow := self.why_slow()):
            refusal = replace(refusal, message=f"{refusal.message}. {slow}")
        return self._failed(generation, from_refusal(refusal), "refused")

    def _abort(self, action: actions.AbortInEngine) -> None:
        self._aborts.setdefault(action.device, []).append(action.request_id)

    def hold_aborts(self) -> None:
        """Holds back messages that abort requests in engines until release_aborts is called, so that the aborts of one step go to
        an engine in one message."""
        self._hold_aborts = True

    def release_aborts(self) -> None:
        self._hold_aborts = False
        if self._aborts:
            self._flush_aborts()

    def forget_aborts(self, device: str) -> None:
        """Drops the aborts that are held back for a device whose engine has ended, because its requests do not run there any
        more."""
        self._aborts.pop(device, None)

    def _flush_aborts(self) -> None:
        aborts, self._aborts = self._aborts, {}
        for device, request_ids in aborts.items():
            self.send(device, protocol.Abort(request_ids=request_ids))

    def _restart_engine(self, action: actions.RestartEngine) -> None:
        log.error("engine is restarted: %s", action.reason, extra=fields(device=action.device, cause=action.cause))
        engine = self.engines.get(action.device)
        if engine is not None:
            engine.restart_stuck(action.reason)

    def _state_changed(self, action: actions.StateChanged) -> None:
        self.metrics.swaps.state_changed(action)
        if action.old in residency.IN_MEMORY and action.new not in residency.IN_MEMORY:
            self._prefixes.forget(action.model)
        # a model's first state is logged with its registration
        level = logging.DEBUG if not action.old else logging.WARNING if action.new in ("failed", "refused") else logging.INFO
        about = fields(model=action.model, device=action.device, cause=action.cause)
        log.log(level, "%s -> %s: %s", action.old, action.new, action.reason, extra=about)
        self.ring.add(
            "state",
            model=action.model,
            old=action.old,
            new=action.new,
            device=action.device,
            reason=action.reason,
            cause=action.cause,
        )

    def _command_done(self, action: actions.CommandDone) -> None:
        future = self._waiting.get(action.cause)
        if future is not None and not future.done():
            future.set_result(action.refusal)

    def lease_of(self, device: str) -> int:
        """Returns the lease that was last sent to the device's engine: the chunks that it may use for KV beyond what is reserved
        for models. 0 if none was sent."""
        return self._leases.get(device, 0)

    def send(self, device: str, message: protocol.Message) -> None:
        """Sends a message to the device's engine, and remembers the lease that the message grants. If the device has no engine, the
        message is dropped."""
        if isinstance(message, _GRANTS_LEASE):
            self._leases[device] = message.lease_chunks
        engine = self.engines.get(device)
        if engine is not None:
            engine.send(message)

    def tell_load(self, load: FinishedLoad | None) -> None:
        """Adds a finished load to the traces of the requests that waited for it, including those whose prompts are being tokenized.
        load: the traced load; None, for a load whose beginning was not traced: nothing is added."""
        if load is None:
            return
        for generation in self.open.by_id.values():
            if generation.trace is not None and generation.model.name == load.model:
                generation.trace.loaded(load)
        for expected in self._expected.values():
            if expected.model == load.model:
                expected.loads.append(load)

    # ---- ends

    def fail(self, generation: Generation, error: HearthError, outcome: str) -> None:
        """Ends a request with an error and reports the error to its sink, which answers the client. outcome: "failed", "timeout" or
        another word of Generation.outcome. The caller has to tell the scheduler that the request has ended, if the scheduler has
        not ended it itself."""
        self._failed(generation, error, outcome)
        generation.sink.failed(error)

    def _failed(self, generation: Generation, error: HearthError, outcome: str) -> _Failed:
        """Ends a request with an error, without reporting it: the caller has to report the returned _Failed to the request's sink
        (the object that receives its tokens) or to whoever submitted the request. outcome: a word of Generation.outcome."""
        if generation.trace is not None:
            generation.trace.failed(error.code)
        self.open.end(generation, outcome)
        return _Failed(generation, error)

    def sink_broke(self, generation: Generation) -> None:
        """Ends a request whose sink, the code that writes its stream, has raised an exception, and logs it. It must be called from
        an `except` block."""
        about = fields(cause=f"req-{generation.request_id}", model=generation.model.name, device=generation.submitted_device)
        log.exception("the stream of a request failed", extra=about)
        open_still = generation.request_id in self.open.by_id
        try:
            if open_still:
                self.open.end(generation, "failed")
            generation.sink.failed(ServerFault("internal_error", "The server failed on this stream; see its log."))
        except Exception:
            log.exception("and could not be told so")
        if open_still:
            self._cancelled(generation.request_id)

    def _cached(self, generation: Generation) -> tuple[tuple[str, int], ...]:
        """Returns a pair (replica, number of tokens) for each replica of the model that has probably cached a prefix of the
        request's prompt."""
        return self._prefixes.find(generation.model.name, _prefix_seed(generation), generation.prompt)

    def _note_prefix(self, generation: Generation) -> None:
        """Records that the replica that runs the request has cached its prompt and the output so far. Only models with several
        replicas are recorded."""
        tokens = [*generation.prompt, *generation.output] if generation.output else generation.prompt
        self._prefixes.note(generation.model.name, _prefix_seed(generation), tokens, generation.replica)

    def _note_output(self, generation: Generation) -> None:
        if generation.model.has_replicas and generation.outcome in ("stop", "length") and generation.replica:
            self._note_prefix(generation)

    def finished(self, request_id: int) -> None:
        self.post(events.RequestFinished(now=time.monotonic(), cause=f"req-{request_id}", request_id=request_id))

    def _cancelled(self, request_id: int) -> None:
        self.post(events.RequestCancelled(now=time.monotonic(), cause=f"req-{request_id}", request_id=request_id))

    def _timed_out(self, generation: Generation, limit_s: float) -> None:
        message = f"The request did not end within request_timeout_s ({limit_s:g} s)."
        self.fail(generation, NotNow("request_timeout", message), "timeout")
        self._cancelled(generation.request_id)


def _prefix_seed(generation: Generation) -> tuple[str, ...]:
    """Returns the values that, besides the tokens, must be equal for two requests to share a cached prefix: tenant, cache salt and
    LoRA adapter ("": none)."""
    adapter = generation.model.adapter
    return generation.tenant, generation.cache_salt, "" if adapter is None else adapter.name


def _adapter_source(model: ModelEntry) -> protocol.AdapterSource | None:
    adapter = model.adapter
    return None if adapter is None else protocol.AdapterSource(adapter.name, adapter.path, adapter.fingerprint)
