"""Carries the node scheduler's decisions out, and tells it what happened. Owns every accepted request until it ends.

The hot path is `_tokens_out`: one call a step, one list append and one sink call a token.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from config.schema import NodeConfig
from daemon.contracts import Generation, ModelEntry
from daemon.errors import HearthError, NotNow, ServerFault, from_refusal
from daemon.event_ring import EventRing
from daemon.loop_watch import LoopWatch
from daemon.metrics import Metrics
from engine import protocol
from scheduler.node import actions, events

log = logging.getLogger("hearthd")
PUBLIC_IDS = 4096


class EnginePort(Protocol):
    """A worker as the dispatcher sees it."""

    def send(self, message: protocol.Message) -> None: ...

    def restart(self, reason: str) -> None: ...


class SchedulerPort(Protocol):
    """scheduler.node.NodeScheduler's moving half."""

    def handle(self, event: events.Event) -> list[actions.Action]: ...

    def next_deadline(self) -> float | None: ...


@dataclass(slots=True, frozen=True)
class LoadSource:
    """What LoadModel says beside the scheduler's figures."""

    path: str
    dtype: str
    entry: ModelEntry


class Dispatcher:
    """RequestPort for the API, WorkerEvents for the engines. All methods run on the event loop."""

    def __init__(
        self,
        scheduler: SchedulerPort,
        config: NodeConfig,
        budgets: Mapping[str, int],
        source: Callable[[str], LoadSource | None],
        ring: EventRing,
        metrics: Metrics,
        watch: LoopWatch,
    ) -> None:
        """budgets: device -> budget_bytes. source: a registered model's files, None when its folder is gone."""
        self.scheduler, self.config, self.ring, self.metrics = scheduler, config, ring, metrics
        self.engines: dict[str, EnginePort] = {}
        self.stats: dict[str, protocol.Stats] = {}
        self._budgets, self._source, self._watch = budgets, source, watch
        self._loop = asyncio.get_running_loop()
        self._generations: dict[int, Generation] = {}
        self._public_ids: dict[str, int] = {}  # the last ones, oldest first
        self._ids = itertools.count(1)
        self._causes = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[actions.Refusal | None]] = {}  # cause -> command
        self._pending: deque[events.Event] = deque()
        self._busy = False
        self._submitting = 0
        self._refused: HearthError | None = None
        self._hold_aborts = False
        self._aborts: dict[str, list[int]] = {}
        self._loading: dict[str, str] = {}  # device -> model it was last told to load
        self._deadline_s: float | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._timeout_timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Future[None] | None = None
        self._carry: dict[type[actions.Action], Callable[[Any], None]] = {
            actions.Load: self._load,
            actions.Evict: self._evict,
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
        request_id = next(self._ids)
        now = time.monotonic()
        generation.request_id, generation.arrived_s = request_id, now
        model = generation.model.name
        self._generations[request_id] = generation
        if generation.public_id:
            self._public_ids[generation.public_id] = request_id
            if len(self._public_ids) > PUBLIC_IDS:
                del self._public_ids[next(iter(self._public_ids))]
        self._submitting, self._refused = request_id, None
        facts = events.RequestFacts(
            request_id=request_id,
            model=model,
            num_prompt_tokens=len(generation.prompt),
            max_tokens=generation.params.max_tokens,
            tenant=generation.tenant,
            priority=generation.priority,
        )
        try:
            self.post(events.RequestArrived(now=now, cause=f"req-{request_id}", request=facts))
        finally:
            self._submitting = 0
        if self._refused is not None:
            raise self._refused
        self.metrics.prompt_tokens[model] += len(generation.prompt)
        self._watch.start()
        if self._timeout_timer is None:
            self._timeout_timer = self._loop.call_later(self.config.request_timeout_s, self._check_timeouts)

    def cancel(self, generation: Generation) -> None:
        if self._generations.get(generation.request_id) is not generation:
            return
        # inside a step it is the sink that has seen a stop string; else the client is gone
        self._end(generation, "stop" if self._hold_aborts else "cancelled")
        self._post_cancelled(generation.request_id)

    @property
    def num_open(self) -> int:
        return len(self._generations)

    def generation(self, request_id: int) -> Generation | None:
        return self._generations.get(request_id)

    def request_id(self, public_id: str) -> int | None:
        """Of an X-Request-Id, also some time after the request ended; for `hearth why`."""
        return self._public_ids.get(public_id)

    # ---- commands

    def next_cause(self, kind: str) -> str:
        return f"{kind}-{next(self._causes)}"

    def command(self, make: Callable[[float, str], events.Event], kind: str = "cli") -> asyncio.Future[actions.Refusal | None]:
        """Posts `make(now, cause)` and returns what CommandDone will say: None is done, else why not."""
        cause = self.next_cause(kind)
        future: asyncio.Future[actions.Refusal | None] = self._loop.create_future()
        self._waiting[cause] = future
        future.add_done_callback(lambda _: self._waiting.pop(cause, None))
        self.post(make(time.monotonic(), cause))
        return future

    def when_empty(self) -> asyncio.Future[None]:
        """Done once no request is open."""
        if self._empty is None or self._empty.done():
            self._empty = self._loop.create_future()
        if not self._generations:
            self._empty.set_result(None)
        return self._empty

    def fail_all(self, error: HearthError) -> int:
        """Ends every open request with `error`; returns how many there were."""
        left = list(self._generations.values())
        for generation in left:
            self._fail(generation, error, "failed")
            self._post_cancelled(generation.request_id)
        return len(left)

    # ---- events and actions

    def post(self, event: events.Event) -> None:
        """Actions are carried out in order; an event posted meanwhile (a sink cancels) waits for its turn."""
        self._pending.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._pending:
                self._handle(self._pending.popleft())
        finally:
            self._busy = False
        if self._aborts and not self._hold_aborts:
            self._flush_aborts()
        self._arm_deadline()

    def _handle(self, event: events.Event) -> None:
        try:
            decided = self.scheduler.handle(event)
        except Exception:
            # one bad event must not take the node down; the request it was about must not hang
            self.metrics.scheduler_errors += 1
            log.exception("the node scheduler failed on %s", event)
            if isinstance(event, events.RequestArrived) and (lost := self._generations.get(event.request.request_id)) is not None:
                self._fail(lost, ServerFault("internal", "The node scheduler failed on this request; see the log."), "failed")
            elif (command := self._waiting.get(event.cause)) is not None and not command.done():
                command.set_exception(ServerFault("internal", "The node scheduler failed on this command; see the log."))
            return
        for action in decided:
            self._carry[type(action)](action)

    def _arm_deadline(self) -> None:
        deadline_s = self.scheduler.next_deadline()
        if deadline_s == self._deadline_s:
            return
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        self._deadline_s = deadline_s
        if deadline_s is not None:
            # relative: the loop's clock may lag behind the monotonic one by its resolution
            self._deadline_timer = self._loop.call_later(max(0.0, deadline_s - time.monotonic()), self._deadline_reached)

    def _deadline_reached(self) -> None:
        now = max(time.monotonic(), self._deadline_s or 0.0)
        self._deadline_timer, self._deadline_s = None, None
        self.post(events.TimePassed(now=now, cause="time"))
        if self._deadline_s is not None and self._deadline_s <= now and self._deadline_timer is not None:
            # a deadline that stays in the past would spin the loop
            self._deadline_timer.cancel()
            self._deadline_timer = self._loop.call_later(0.05, self._deadline_reached)

    def _load(self, action: actions.Load) -> None:
        source = self._source(action.model)
        if source is None:
            self.post(
                events.LoadFailed(
                    now=time.monotonic(),
                    cause=action.cause,
                    placement_id=action.placement_id,
                    reason="its folder is gone",
                    permanent=True,
                )
            )
            return
        entry = source.entry
        self._loading[action.device] = action.model
        self._send(
            action.device,
            protocol.LoadModel(
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
            ),
        )

    def _evict(self, action: actions.Evict) -> None:
        self.metrics.evictions[action.model] += 1
        message = protocol.EvictModel(placement_id=action.placement_id, model=action.model, lease_chunks=action.lease_chunks)
        self._send(action.device, message)

    def _grant_lease(self, action: actions.GrantLease) -> None:
        self._send(action.device, protocol.SetLease(lease_chunks=action.lease_chunks))

    def _submit(self, action: actions.Submit) -> None:
        generation = self._generations.get(action.request_id)
        if generation is None:
            return  # ended meanwhile; its RequestCancelled or RequestFinished is on its way
        if generation.submitted_device:
            self.metrics.resubmitted += 1
        generation.submitted_device = action.device
        self._send(
            action.device,
            protocol.Submit(
                request_id=action.request_id,
                model=action.model,
                prompt=generation.prompt,
                params=generation.params,
                output=generation.output,
                cache_salt=generation.tenant,
                priority=generation.priority,
                weight=self._weight(action.model),
            ),
        )

    def _weight(self, model: str) -> float:
        config = self.config.models.get(model)
        return config.priority if config is not None else 1.0

    def _reject(self, action: actions.Reject) -> None:
        generation = self._generations.get(action.request_id)
        if generation is not None:
            self._fail(generation, from_refusal(action.refusal), "refused")

    def _abort(self, action: actions.AbortInEngine) -> None:
        self._aborts.setdefault(action.device, []).append(action.request_id)

    def _flush_aborts(self) -> None:
        aborts, self._aborts = self._aborts, {}
        for device, request_ids in aborts.items():
            self._send(device, protocol.Abort(request_ids=request_ids))

    def _restart_engine(self, action: actions.RestartEngine) -> None:
        log.error("engine %s is restarted: %s", action.device, action.reason)
        engine = self.engines.get(action.device)
        if engine is not None:
            engine.restart(action.reason)

    def _state_changed(self, action: actions.StateChanged) -> None:
        where = f" on {action.device}" if action.device else ""
        # what a model is at first is told by its registration line
        level = logging.DEBUG if not action.old else logging.WARNING if action.new in ("failed", "refused") else logging.INFO
        log.log(level, "%s: %s -> %s%s (%s; %s)", action.model, action.old, action.new, where, action.reason, action.cause)
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

    def _send(self, device: str, message: protocol.Message) -> None:
        engine = self.engines.get(device)
        if engine is not None:
            engine.send(message)

    # ---- WorkerEvents

    def engine_up(self, device: str, message: protocol.EngineReady) -> None:
        log.info("engine %s is up (pid %d, %d chunks)", device, message.pid, message.num_chunks)
        self.ring.add("engine", device=device, state="up", pid=message.pid)
        self.post(
            events.EngineUp(
                now=time.monotonic(), cause=self.next_cause(f"engine-{device}"), device=device, budget_bytes=self._budgets[device]
            )
        )

    def engine_down(self, device: str, running: tuple[int, ...], reason: str) -> None:
        self.stats.pop(device, None)
        self._aborts.pop(device, None)
        self.metrics.engine_restarts[device] += 1
        self.ring.add("engine", device=device, state="down", reason=reason, running=len(running))
        self.post(
            events.EngineDown(
                now=time.monotonic(), cause=self.next_cause(f"engine-{device}"), device=device, running=running, reason=reason
            )
        )

    def engine_message(self, device: str, message: Any) -> None:
        kind = type(message)
        if kind is protocol.TokensOut:
            self._tokens_out(message)
        elif kind is protocol.Stats:
            self.stats[device] = message
        elif kind is protocol.LoadProgress:
            self._load_progress(device, message)
        elif kind is protocol.LoadDone:
            self.metrics.loads[message.model, "done"] += 1
            self.metrics.load_seconds[message.model] += message.seconds
            seconds = round(message.seconds, 6)
            self.ring.add("loaded", model=message.model, device=device, seconds=seconds, bytes_read=message.bytes_read)
            self.post(
                events.LoadFinished(
                    now=time.monotonic(),
                    cause=f"load-{message.placement_id}",
                    placement_id=message.placement_id,
                    seconds=message.seconds,
                )
            )
        elif kind is protocol.LoadFailed:
            self.metrics.loads[message.model, "failed"] += 1
            self.post(
                events.LoadFailed(
                    now=time.monotonic(),
                    cause=f"load-{message.placement_id}",
                    placement_id=message.placement_id,
                    reason=message.error,
                    permanent=message.permanent,
                )
            )
        elif kind is protocol.Evicted:
            self.ring.add("evicted", model=message.model, device=device)
            self.post(
                events.EvictFinished(now=time.monotonic(), cause=f"evict-{message.placement_id}", placement_id=message.placement_id)
            )
        elif kind is protocol.RequestFailed:
            self._request_failed(message)

    def _load_progress(self, device: str, message: protocol.LoadProgress) -> None:
        self.ring.add(
            "load_progress",
            keep=False,
            model=self._loading.get(device, ""),
            device=device,
            placement_id=message.placement_id,
            bytes_done=message.bytes_done,
            bytes_total=message.bytes_total,
        )
        self.post(
            events.LoadProgressed(
                now=time.monotonic(),
                cause=f"load-{message.placement_id}",
                placement_id=message.placement_id,
                bytes_done=message.bytes_done,
                bytes_total=message.bytes_total,
            )
        )

    def _request_failed(self, message: protocol.RequestFailed) -> None:
        generation = self._generations.get(message.request_id)
        log.warning("request %d failed in the engine: %s: %s", message.request_id, message.code, message.error)
        if generation is not None:
            self._fail(generation, ServerFault(message.code, message.error), "failed")
            self._post_finished(message.request_id)

    # ---- the hot path

    def _tokens_out(self, message: protocol.TokensOut) -> None:
        find = self._generations.get
        ids, finish = message.ids, message.finish
        metrics, model = self.metrics, message.model
        metrics.steps[model] += 1
        metrics.step_seconds[model] += message.seconds
        metrics.generated_tokens[model] += len(ids)
        if message.cached:
            self._note_cached(message)
        self._hold_aborts = True
        try:
            if not message.counts and not finish:
                for request_id, token in zip(message.request_ids, ids, strict=True):
                    generation = find(request_id)
                    if generation is not None:
                        output = generation.output
                        if not output:
                            self._first_token(generation)
                        output.append(token)
                        generation.sink.tokens((token,), 0)
            else:
                self._mixed_rows(message)
        finally:
            self._hold_aborts = False
            if self._aborts:
                self._flush_aborts()

    def _mixed_rows(self, message: protocol.TokensOut) -> None:
        """Rows of several tokens, or ends among them."""
        start = 0
        num_rows = len(message.request_ids)
        counts = message.counts or (1,) * num_rows
        finishes = message.finish or (0,) * num_rows
        for request_id, count, finish in zip(message.request_ids, counts, finishes, strict=True):
            row = message.ids[start : start + count]
            start += count
            generation = self._generations.get(request_id)
            if generation is None:
                continue
            if row and not generation.output:
                self._first_token(generation)
            generation.output += row
            if finish == protocol.FINISH_NONE:
                generation.sink.tokens(row, 0)
            elif finish == protocol.FINISH_ABORT:
                # the model went away under it and the scheduler had not said so before: never silent
                error = NotNow(
                    "unloaded", f"Model {generation.model.name!r} was evicted while this request ran.", retry_after_s=1.0
                )
                self._fail(generation, error, "failed")
                self._post_finished(request_id)
            else:
                self._end(generation, "stop" if finish == protocol.FINISH_STOP else "length")
                generation.sink.tokens(row, finish)
                self._post_finished(request_id)

    def _note_cached(self, message: protocol.TokensOut) -> None:
        for request_id, num_cached in message.cached.items():
            generation = self._generations.get(request_id)
            if generation is not None and not generation.output:
                generation.num_cached = num_cached
                self.metrics.cached_tokens[message.model] += num_cached

    def _first_token(self, generation: Generation) -> None:
        generation.first_token_s = time.monotonic()
        self.metrics.ttft[generation.model.name].add(generation.first_token_s - generation.arrived_s)

    # ---- ends

    def _end(self, generation: Generation, outcome: str) -> None:
        model = generation.model.name
        self._generations.pop(generation.request_id, None)
        self.metrics.requests[model, outcome] += 1
        if not self._generations:
            self._watch.stop()
            if self._timeout_timer is not None:
                self._timeout_timer.cancel()
                self._timeout_timer = None
            if self._empty is not None and not self._empty.done():
                self._empty.set_result(None)

    def _fail(self, generation: Generation, error: HearthError, outcome: str) -> None:
        self._end(generation, outcome)
        if generation.request_id == self._submitting:
            self._refused = error  # submit() raises it; the sink was never told of the request
        else:
            generation.sink.failed(error)

    def _post_finished(self, request_id: int) -> None:
        self.post(events.RequestFinished(now=time.monotonic(), cause=f"req-{request_id}", request_id=request_id))

    def _post_cancelled(self, request_id: int) -> None:
        self.post(events.RequestCancelled(now=time.monotonic(), cause=f"req-{request_id}", request_id=request_id))

    def _check_timeouts(self) -> None:
        """Requests lie in the dict in the order they came, so the oldest is the first."""
        self._timeout_timer = None
        limit_s = self.config.request_timeout_s
        now = time.monotonic()
        while self._generations:
            oldest = next(iter(self._generations.values()))
            left_s = oldest.arrived_s + limit_s - now
            if left_s > 0:
                self._timeout_timer = self._loop.call_later(left_s, self._check_timeouts)
                return
            message = f"The request did not end within request_timeout_s ({limit_s:g} s)."
            self._fail(oldest, NotNow("request_timeout", message), "timeout")
            self._post_cancelled(oldest.request_id)
