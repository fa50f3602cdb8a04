"""Decides which model is on which device and which request goes to which engine: a pure state machine.

Start here. `handle` takes one event and returns the actions to carry out, in order. The caller reports their results as further
events. Nothing here reads a clock, blocks or fails: a refusal is a value. docs/design/models.md has the rules.

    events -> handlers (requests, commands, registration, placements, engines) change the records of node.py and mark
              the models and devices that they changed
           -> settle: each marked model takes the steps that have become possible for it, then placements are tried on
              each marked device (look, eviction, placements)
           -> actions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scheduler.node import (
    admission,
    commands,
    dry_run,
    engines,
    events,
    expected,
    expert_copies,
    explain,
    keep_alive,
    keeping,
    leave_rules,
    loads,
    models,
    placements,
    registration,
    requests,
    residency,
)
from scheduler.node.actions import Action, Refusal
from scheduler.node.events import Event
from scheduler.node.groups import joined
from scheduler.node.host_tier import HostCopy
from scheduler.node.ledger import kv_reserved_bytes
from scheduler.node.node import Device, Model, Node
from scheduler.node.settings import SchedulerSettings
from scheduler.node.settle import settle
from scheduler.node.validation import validate
from scheduler.node.views import DevicePlan, DeviceView, HostTierView, LoadPlan, ModelView, PlacementView, QueuedView

__all__ = ["NodeScheduler", "SchedulerSettings"]


def _time_passed(node: Node, event: events.TimePassed) -> None:
    """Handles TimePassed by doing nothing, because deadlines are checked after every event."""


_HANDLERS: dict[type[Event], Callable[[Node, Any], None]] = {
    events.ModelRegistered: registration.registered,
    events.ModelRemoved: registration.removed,
    events.CopiesChosen: expert_copies.chosen,
    events.HostCopiesFound: keeping.found,
    events.EngineUp: engines.up,
    events.EngineDown: engines.down,
    events.LoadStreams: loads.load_streams,
    events.LoadFinished: loads.load_finished,
    events.LoadFailed: loads.load_failed,
    events.LoadProgressed: loads.load_progressed,
    events.EvictFinished: placements.evict_finished,
    events.KVNoted: engines.kv_noted,
    events.StepLasts: engines.step_lasts,
    events.PrefillMeasured: engines.prefill_measured,
    events.RequestArrived: requests.arrived,
    events.RequestExpected: expected.begins,
    events.ExpectationOver: expected.over,
    events.RequestCancelled: requests.cancelled,
    events.RequestFinished: requests.finished,
    events.KeepAliveSet: keep_alive.set_by_client,
    events.LoadRequested: commands.load,
    events.WarmRequested: commands.warm,
    events.UnloadRequested: commands.unload,
    events.PinRequested: commands.pin,
    events.UnpinRequested: commands.unpin,
    events.EnableRequested: commands.enable,
    events.DisableRequested: commands.disable,
    events.DrainRequested: commands.drain,
    events.ResumeRequested: commands.resume,
    events.TimePassed: _time_passed,
}


class NodeScheduler:
    """The state machine that places models on devices and submits requests to engines. devices: name -> budget in bytes of the
    devices whose engines will start; models can be assigned to these devices before the engines are up."""

    def __init__(self, settings: SchedulerSettings, devices: Mapping[str, int] | None = None) -> None:
        self._node = Node(settings)
        for name, budget_bytes in (devices or {}).items():
            engines.declare(self._node, name, budget_bytes)

    def handle(self, event: Event) -> list[Action]:
        """Handles an event and returns the actions to carry out now, in order. If the event's `now` is earlier than that of a
        previous event, the previous event's time is used."""
        node = self._node
        node.now = max(node.now, event.now)
        node.cause = event.cause
        node.actions = []
        _HANDLERS[type(event)](node, event)
        _deadlines(node)
        settle(node)
        return node.actions

    def next_deadline(self) -> float | None:
        """Returns the monotonic seconds at which the caller must post `TimePassed`; None if nothing depends on time alone."""
        first = [entry[0] for entry in (self._node.deadlines.peek(), self._node.waits.peek()) if entry is not None]
        return min(first, default=None)

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """Replaces the settings, which apply from the next event on. Raises ValueError if chunk_bytes or host_tier_slots differs,
        which needs a restart."""
        if settings.host_tier_slots != self._node.settings.host_tier_slots:
            raise ValueError(f"host_tier_slots cannot change while running: it is {self._node.settings.host_tier_slots}")
        if settings.chunk_bytes != self._node.settings.chunk_bytes:
            raise ValueError(
                f"chunk_bytes cannot change while running: {self._node.settings.chunk_bytes} -> {settings.chunk_bytes}"
            )
        self._node.settings = settings

    def validate(self) -> None:
        """Raises AssertionError, with the name of the invariant, if one is violated. O(everything): for tests."""
        validate(self._node)

    # ---- what the operator sees

    def snapshot(self) -> list[ModelView]:
        return [_model_view(self._node, model) for model in self._node.models.values()]

    def model(self, name: str) -> ModelView | None:
        model = self._node.models.get(name)
        return None if model is None else _model_view(self._node, model)

    def state(self, name: str) -> str | None:
        """Returns the state of one model, such as "ready" (residency.py lists them), which is cheaper than its whole view; None if
        it is unknown."""
        model = self._node.models.get(name)
        return None if model is None else model.state

    def has_engines(self, name: str) -> bool:
        """Returns whether engines are up on enough devices for this model; False if it is unknown."""
        model = self._node.models.get(name)
        return model is not None and self._node.has_engines(model)

    def too_large(self, name: str) -> str:
        """Returns a text with the sizes that shows why a model fits on no device; "" for any other model. Also "" while a copy of
        the model is loaded that was made before it became too large."""
        model = self._node.models.get(name)
        if model is None or model.state != residency.REFUSED or model.facts.unusable:
            return ""
        return model.too_large

    def devices(self) -> list[DeviceView]:
        return [_device_view(self._node, device) for device in self._node.devices.values()]

    def host_tier(self) -> HostTierView:
        host = self._node.host
        return HostTierView(host.num_slots, self._node.settings.chunk_bytes, host.counts())

    @property
    def host_revision(self) -> int:
        """A counter that rises with each change of what `host_copies` returns."""
        return self._node.host.revision

    def host_copies(self) -> list[tuple[str, HostCopy]]:
        """Returns (model, copy) for each copy of weights or KV in host memory that the model's next load may use."""
        return self._node.host.valid_copies()

    def queue(self) -> list[QueuedView]:
        """Returns all waiting requests, model by model, those of a model in the order of its queue. They may be submitted in
        another order: the next one is of the tenant with the fewest running requests for its weight."""
        return [
            QueuedView(request_id, model.name, request.facts.tenant, position, request.arrived, request.resubmission)
            for model in self._node.models.values()
            for position, (request_id, request) in enumerate(model.queue.items())
        ]

    def refusal(self, model: str, tenant: str) -> Refusal | None:
        """Returns why a request of the tenant that arrived now would be refused; None if it would be accepted. Changes nothing."""
        facts = events.RequestFacts(request_id=0, model=model, num_prompt_tokens=0, max_tokens=0, tenant=tenant)
        return admission.refuse(self._node, self._node.models.get(model), facts)

    def gate(self) -> Refusal | None:
        """Returns why the node takes no new requests, whatever they are for; None if it takes them."""
        return admission.gate(self._node)

    def why(self, name_or_request: str) -> list[str]:
        """Returns the lines of `hearth why` for a model's name or a request's id: what has happened to it, oldest first, and what
        it waits for; [] if it is unknown."""
        return explain.why(self._node, name_or_request)

    def plan_load(self, name: str, now: float) -> LoadPlan | None:
        """Returns what loading the model at the time `now` would do, and why; None if the model is unknown. Nothing is changed
        except that the scheduler's time advances to `now`."""
        self._node.now = max(self._node.now, now)
        model = self._node.models.get(name)
        return None if model is None else dry_run.load(self._node, model)

    def plan_room(self, device: str, num_bytes: int, now: float) -> DevicePlan | None:
        """Returns which models would be evicted from the device at the time `now` to free num_bytes; None if the device is unknown.
        Nothing is changed except that the scheduler's time advances to `now`."""
        self._node.now = max(self._node.now, now)
        known = self._node.devices.get(device)
        return None if known is None else dry_run.room(self._node, known, num_bytes)

    def history(self, model: str = "") -> list[PlacementView]:
        """Returns the last placements, oldest first. model: only placements of this model and those for which it was evicted; "":
        all."""
        return self._node.history.views(model)

    def health(self) -> list[str]:
        """Returns a line for each device on which a roll-back has missed its deadline and whose engine has not been restarted yet;
        [] if the node is healthy."""
        return [device.problem for device in self._node.devices.values() if device.problem]

    @property
    def draining(self) -> bool:
        return self._node.draining


def _deadlines(node: Node) -> None:
    requests.expire(node)
    while (due := node.deadlines.pop_due(node.now)) is not None:
        kind, name = due
        if kind == "look":
            node.stir((name,))
        elif kind == "load":
            loads.load_overdue(node, node.models[name])
        elif kind == "evict":
            placements.evict_overdue(node, node.models[name])
        elif kind == "preempt":
            placements.drained_too_long(node, node.models[name])
        elif kind in ("retry", "leave"):
            node.touch(node.models[name])
        elif kind == "engines":
            commands.waited_for_engines(node, node.models[name])
        elif kind == "quarantine":
            models.quarantine_over(node, node.models[name])


def _model_view(node: Node, model: Model) -> ModelView:
    copy, placement = model.copy, model.placement
    facts = copy.facts if copy else model.facts
    return ModelView(
        name=model.name,
        state=model.state,
        device=joined(copy.devices) if copy else "",
        devices=copy.devices if copy else (),
        num_ranks=facts.num_ranks,
        expert_copies=copy.expert_copies if copy else 0,
        weights_bytes=facts.weights_bytes,
        kv_reserved_bytes=kv_reserved_bytes(facts),
        active=len(model.running),
        queued=len(model.queue),
        pinned=model.pinned,
        last_used=model.last_used,
        reason=model.reason,
        placement_id=copy.placement_id if copy else placement.id if placement else None,
        progress=model.progress,
        quarantined_until=model.quarantined_until,
        keep_alive_s=model.keep_alive_s,
        leaves_at=leave_rules.leaves_at(model),
        closed=model.closed,
        kept_bytes=kept.num_bytes if (kept := node.host.weights.get(model.name)) is not None else 0,
        saved_kv_tokens=saved.num_tokens if (saved := node.host.kv.get(model.name)) is not None else 0,
    )


def _device_view(node: Node, device: Device) -> DeviceView:
    ledger = device.ledger
    return DeviceView(
        name=device.name,
        up=device.up,
        budget_bytes=device.budget_bytes,
        chunk_bytes=node.settings.chunk_bytes,
        total_chunks=ledger.total_chunks,
        work_space_chunks=ledger.work_space_chunks,
        held={name: size.chunks for name, size in ledger.held.items()},
        weights_chunks=sum(size.weights_chunks for size in ledger.held.values()),
        promised_chunks=ledger.promised_chunks,
        lease_chunks=ledger.lease_chunks,
        loading=device.loading.model if device.loading else "",
        num_waiting=len(device.by_age),
        problem=device.problem,
    )
