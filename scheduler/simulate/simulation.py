"""Runs a simulation: events go to a decider (the node scheduler, or the rule of another system), the simulated engines and
loaders carry out its actions in their own time, and the results are the next events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

from scheduler.node import actions, events
from scheduler.node.events import Event, ModelFacts, RequestFacts
from scheduler.report_intervals import MEASURED_PREFILL_TOKENS, PREFILL_EVERY_S, STATS_EVERY_S
from scheduler.simulate.costs import Costs
from scheduler.simulate.engine import SimulatedEngine
from scheduler.simulate.outcome import RequestOutcome, Swaps
from scheduler.simulate.steps import StepSettings
from scheduler.simulate.trace import TraceRequest

PROGRESS_EVERY = 1000  # requests between two reports of progress


class Decider(Protocol):
    """Decides where models are loaded and where requests run. These are the methods of NodeScheduler that a simulation calls; the
    rules of other systems (baselines.OnDemand) have them, too."""

    def handle(self, event: Event) -> list[actions.Action]: ...

    def next_deadline(self) -> float | None: ...


class SimulationError(Exception):
    """Raised if requests are left that will never be served, because no event is under way and no deadline is set."""


@dataclass(slots=True, frozen=True)
class SimulatedNode:
    """A node to simulate. devices: name -> budget in bytes. steps: the settings that limit the steps of its engines.
    host_tier_bytes: host memory for weights and saved KV."""

    devices: Mapping[str, int]
    chunk_bytes: int
    models: Mapping[str, ModelFacts]
    costs: Costs
    steps: StepSettings
    host_tier_bytes: int = 0

    @property
    def host_tier_slots(self) -> int:
        return self.host_tier_bytes // self.chunk_bytes


@dataclass(slots=True)
class Run:
    outcomes: list[RequestOutcome]
    swaps: Swaps
    num_events: int


@dataclass(slots=True, eq=False)
class _SimulatedCopy:
    load: actions.Load
    ready_s: float | None = None
    restored: dict[int, int] = field(default_factory=dict)  # request id -> number of tokens whose KV is restored with the model


class Simulation:
    """One run of one decider over a trace. on_progress: called after every PROGRESS_EVERY ended requests with (number of requests
    ended, number of all requests)."""

    def __init__(
        self,
        node: SimulatedNode,
        decider: Decider,
        trace: Sequence[TraceRequest],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.node, self.decider, self.on_progress = node, decider, on_progress
        self.engines = {name: SimulatedEngine(node.costs, node.steps) for name in node.devices}
        self.outcomes = [RequestOutcome(at, request) for at, request in enumerate(trace)]
        self.swaps = Swaps()
        self.now = 0.0
        self.num_events = self.num_ended = 0
        self._due: list[tuple[float, int, Event]] = []
        self._num_due = 0
        self._copies: dict[int, _SimulatedCopy] = {}  # placement id -> copy
        self._placement_of: dict[tuple[str, str], int] = {}  # (device, model) -> placement id
        self._saved_kv: dict[bytes, dict[int, int]] = {}  # index of an eviction -> request id -> saved tokens
        self._note_kv_at = dict.fromkeys(node.devices, 0.0)
        self._measure_prefill_at: dict[str, float] = {}  # model -> time of its next measurement
        self._carry: dict[type[actions.Action], Callable[[Any], None]] = {
            actions.Load: self._load,
            actions.Evict: self._evict,
            actions.GrantLease: self._grant,
            actions.Submit: self._submit,
            actions.Reject: self._reject,
        }

    def run(self) -> Run:
        """Runs the trace to its end and returns the outcomes of its requests. Raises SimulationError if requests are left that
        nothing will serve."""
        for name, budget_bytes in self.node.devices.items():
            self._post(events.EngineUp(now=0.0, cause="boot", device=name, budget_bytes=budget_bytes))
        for facts in self.node.models.values():
            self._post(events.ModelRegistered(now=0.0, cause="boot", facts=facts))
        arrivals = iter(self.outcomes)
        arrival = next(arrivals, None)
        while self.num_ended < len(self.outcomes):
            self.now = max(self.now, self._run_engines(self._next_event_at(arrival)))
            for name, engine in self.engines.items():
                engine.advance(self.now)
                self._measure(name, engine)
                ended, engine.ended = engine.ended, []
                for outcome in ended:
                    self._ended(outcome)
                    self._post(
                        events.RequestFinished(now=self.now, cause=f"req-{outcome.request_id}", request_id=outcome.request_id)
                    )
            while self._due and self._due[0][0] <= self.now:
                self._happen(heappop(self._due)[2])
            deadline = self.decider.next_deadline()
            if deadline is not None and deadline <= self.now:
                self._post(events.TimePassed(now=self.now, cause="time"))
            while arrival is not None and arrival.request.time_s <= self.now:
                self._arrive(arrival)
                arrival = next(arrivals, None)
        return Run(self.outcomes, self.swaps, self.num_events)

    def _measure(self, device: str, engine: SimulatedEngine) -> None:
        """Passes the measurements that a real node reports for a device, the KV in use and the speed of prompts, to the decider
        (the node scheduler or the rule that is simulated). Must be called before other events of the same time that depend on them
        are passed on."""
        if self.now >= self._note_kv_at[device]:
            self._note_kv_at[device] = self.now + STATS_EVERY_S
            kv_bytes = {name: (num_bytes, 0) for name, num_bytes in engine.kv_bytes().items()}
            if kv_bytes:
                noted = events.KVNoted(
                    now=self.now, cause=f"engine-{device}", device=device, kv_bytes=kv_bytes, waiting=engine.waiting()
                )
                self._post(noted)
        for outcome in engine.first_tokens:
            request = outcome.request
            if request.input_tokens < MEASURED_PREFILL_TOKENS or self.now < self._measure_prefill_at.get(request.model, 0.0):
                continue
            if outcome.num_resubmissions:
                continue
            self._measure_prefill_at[request.model] = self.now + PREFILL_EVERY_S
            self._post(
                events.PrefillMeasured(
                    now=self.now,
                    cause=f"req-{outcome.request_id}",
                    model=request.model,
                    device=device,
                    num_tokens=request.input_tokens,
                    seconds=self.now - outcome.began_s,
                )
            )
        engine.first_tokens.clear()

    def _next_event_at(self, arrival: RequestOutcome | None) -> float | None:
        """Returns the time of the next event that does not come from an engine; None if there is none. arrival: the request that
        arrives next; None if all have arrived."""
        times = (
            self._due[0][0] if self._due else None,
            arrival.request.time_s if arrival is not None else None,
            self.decider.next_deadline(),
        )
        return min((at for at in times if at is not None), default=None)

    def _run_engines(self, until: float | None) -> float:
        """Advances the engines until a request gets its first token or ends, or until the time `until` (None: no limit). Returns
        the time that is reached. Raises SimulationError if no engine has work and there is no limit."""
        while True:
            at, first = until, None
            for engine in self.engines.values():
                ends_at = engine.next_at()
                if ends_at is not None and (at is None or ends_at <= at):
                    at, first = ends_at, engine
            if at is None:
                left = [one.request.model for one in self.outcomes if one.finished_s is None and not one.refusal]
                raise SimulationError(
                    f"{len(left)} requests are left and nothing is under way for them: {', '.join(sorted(set(left)))}"
                )
            if first is None:
                return at
            first.advance(at)
            if first.first_tokens or first.ended:
                return at

    def _post(self, event: Event) -> None:
        self.num_events += 1
        for action in self.decider.handle(event):
            carry = self._carry.get(type(action))
            if carry is not None:
                carry(action)

    def _later(self, seconds: float, event: Event) -> None:
        self._num_due += 1
        heappush(self._due, (self.now + seconds, self._num_due, event))

    def _happen(self, event: Event) -> None:
        """Handles the event that a load or an eviction has ended, and passes it to the decider (the node scheduler or the rule that
        is simulated). The end of a load that was cancelled before is ignored."""
        if isinstance(event, events.LoadFinished):
            copy = self._copies.get(event.placement_id)
            if copy is None:
                return
            copy.ready_s = self.now
            facts = self.node.models[copy.load.model]
            reserved_bytes = copy.load.kv_reserved_chunks * self.node.chunk_bytes
            followers = (self.engines[device] for device, _ in copy.load.further)
            self.engines[copy.load.device].host(facts, reserved_bytes, copy.restored, followers)
        self._post(event)

    def _arrive(self, outcome: RequestOutcome) -> None:
        request = outcome.request
        cause = f"req-{outcome.request_id}"
        facts = RequestFacts(outcome.request_id, request.model, request.input_tokens, request.output_tokens)
        self._post(events.RequestArrived(now=self.now, cause=cause, request=facts))

    def _ended(self, outcome: RequestOutcome) -> None:
        outcome.finished_s = self.now
        self._count_end()

    def _count_end(self) -> None:
        self.num_ended += 1
        if self.on_progress is not None and self.num_ended % PROGRESS_EVERY == 0:
            self.on_progress(self.num_ended, len(self.outcomes))

    # ---- actions

    def _load(self, action: actions.Load) -> None:
        """Starts a load and schedules its end: first the weights are loaded, from host memory or disk, then KV that was saved is
        restored."""
        copy = self._copies[action.placement_id] = _SimulatedCopy(action, restored=self._saved_kv.pop(action.kv_index, {}))
        self._placement_of[action.device, action.model] = action.placement_id
        self._set_leases(action)
        facts, costs = self.node.models[action.model], self.node.costs
        num_tokens = sum(copy.restored.values())
        restore_s = num_tokens * facts.kv_bytes_per_token / costs.copy_bytes_per_s
        self.swaps.restored_kv_tokens += num_tokens
        if action.source_slots:
            seconds, copy_s = costs.host_load_s(facts), costs.host_copy_s(facts)
            self.swaps.num_host_loads += 1
            self.swaps.host_bytes += facts.all_weights_bytes
        else:
            seconds, copy_s = costs.disk_load_s(facts), 0.0
            self.swaps.num_disk_loads += 1
            self.swaps.disk_bytes += facts.all_weights_bytes
        seconds += restore_s
        finished = events.LoadFinished(
            now=self.now + seconds,
            cause="load",
            placement_id=action.placement_id,
            seconds=seconds,
            kept=bool(action.source_slots or action.keep_slots),
            copy_s=copy_s,
            restored_kv_tokens=num_tokens,
        )
        self._later(seconds, finished)

    def _evict(self, action: actions.Evict) -> None:
        """Starts an eviction and schedules its end. Saves the KV of running requests, in the order of their submission, until the
        KV of a request does not fit the remaining granted slots of host memory; of no request is only a part saved."""
        copy = self._copies.pop(action.placement_id)
        engine, facts, chunk_bytes = self.engines[action.device], self.node.models[action.model], self.node.chunk_bytes
        self._set_leases(action)
        saved: dict[int, int] = {}
        step_s = 0.0
        if copy.ready_s is not None:
            step_s = engine.end_step_of(action.model)
            room = len(action.save_slots) * chunk_bytes
            for request_id, num_tokens in engine.hosted[action.model].kv_tokens().items():
                room -= num_tokens * facts.kv_bytes_per_token
                if room < 0:
                    break
                saved[request_id] = num_tokens
            self.swaps.num_preemptions += bool(engine.drop(action.model))
        elif copy.restored:  # a load that was withdrawn: what was saved is there still
            self._saved_kv[copy.load.kv_index] = copy.restored
        self.swaps.num_evictions += 1
        index = b"%d" % action.placement_id
        num_tokens = sum(saved.values())
        num_bytes = num_tokens * facts.kv_bytes_per_token
        if saved:
            self._saved_kv[index] = saved
            self.swaps.saved_kv_tokens += num_tokens
        seconds = step_s + self.node.costs.evict_s + num_bytes / self.node.costs.copy_bytes_per_s
        finished = events.EvictFinished(
            now=self.now + seconds,
            cause="evict",
            placement_id=action.placement_id,
            kv_slots=action.save_slots[: -(-num_bytes // chunk_bytes)],
            kv_index=index,
            saved_kv_tokens=num_tokens,
        )
        self._later(seconds, finished)

    def _set_leases(self, action: actions.Load | actions.Evict) -> None:
        for device, lease_chunks in action.leases.items():
            self.engines[device].set_lease(lease_chunks * self.node.chunk_bytes)

    def _grant(self, action: actions.GrantLease) -> None:
        self.engines[action.device].set_lease(action.lease_chunks * self.node.chunk_bytes)

    def _submit(self, action: actions.Submit) -> None:
        outcome = self.outcomes[action.request_id]
        if outcome.submitted_s is None:
            outcome.submitted_s = self.now
            copy = self._copies[self._placement_of[action.device, action.model]]
            assert copy.ready_s is not None
            outcome.missed = copy.ready_s > outcome.request.time_s
        else:
            outcome.num_resubmissions += 1
        self.engines[action.device].submit(outcome, action.model)

    def _reject(self, action: actions.Reject) -> None:
        self.outcomes[action.request_id].refusal = action.refusal.code
        self._count_end()
