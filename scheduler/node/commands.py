"""Handles the operator's commands. Each is answered exactly once, by a CommandDone whose `cause` is the id of the command."""

from __future__ import annotations

from scheduler.node import admission, explain, keeping, look, models, pins, placements, requests, residency
from scheduler.node.actions import CommandDone, Refusal
from scheduler.node.events import (
    DisableRequested,
    DrainRequested,
    EnableRequested,
    LoadRequested,
    PinRequested,
    ResumeRequested,
    UnloadRequested,
    UnpinRequested,
    WarmRequested,
)
from scheduler.node.groups import joined
from scheduler.node.node import Model, Node


def load(node: Node, event: LoadRequested | WarmRequested) -> None:
    """Handles the command to load a model. It is answered when the model is ready or cannot be loaded. The model then stays on its
    device at least until its next request, also if it was loaded already when the command came."""
    model = _find(node, event.model)
    if model is None:
        return
    refusal = admission.removed(model) if model.removed else admission.closed(node, model)
    if refusal is None and model.copy is None and not pins.has_place(node, model):
        refusal = pins.would_not_fit(node, model)
    if refusal is None and model.copy is not None:
        model.copy.requested = False
        node.touch(model)
    if refusal is not None or model.state == residency.READY:
        _done(node, event.model, refusal)
        return
    _wait_for_ready(node, model)


def warm(node: Node, event: WarmRequested) -> None:
    """Handles the command to load a model ahead of its requests. It is refused if the load cannot begin at once. (A model that
    waited for its load would in time become overdue, and be placed before models with requests.)"""
    model = node.models.get(event.model)
    is_resting = model is not None and model.copy is None and model.placement is None
    if model is not None and is_resting and not model.removed and admission.closed(node, model) is None:
        refusal = in_use(node, model)
        if refusal is not None:
            _done(node, event.model, refusal)
            return
    load(node, event)


def in_use(node: Node, model: Model) -> Refusal | None:
    """Returns why a load that no request waits for is refused, for example because the memory that it needs is in use; None if it
    may begin. The load is refused if it cannot begin now, if another model waits for one of its devices, or if it would evict a
    model for which no request has come since a command or a pin loaded that model."""
    if not pins.has_place(node, model):
        return pins.would_not_fit(node, model)
    if model.retry_at > node.now:
        return Refusal("busy", f"the load is tried again in {model.retry_at - node.now:.1f} s")
    option = look.best_option(node, model, may_force=False)
    if option is None or option.forced:
        return Refusal("would_not_fit", "; ".join(explain.obstacles(node, model)))
    for name in option.devices:
        first = node.devices[name].by_age.peek()
        if first is not None and first[1] != model.name:
            return Refusal("would_not_fit", f"{name}: {first[1]} waits for room there")
    unused = [victim.name for victim in option.victims if (copy := node.models[victim.name].copy) and not copy.requested]
    if unused:
        where = joined(option.devices)
        return Refusal("would_not_fit", f"{where}: it would take the place of {', '.join(unused)}, loaded ahead as well")
    return None


def pin(node: Node, event: PinRequested) -> None:
    """Handles the command to pin a model and load it. The model is pinned at once; the command is answered when the model is ready
    or cannot be loaded."""
    model = _find(node, event.model)
    if model is None:
        return
    refusal = admission.removed(model) if model.removed else admission.closed(node, model)
    refusal = refusal or pins.pin(node, model)
    if refusal is not None:
        _done(node, event.model, refusal)
        return
    if model.victim_of and model.copy is not None and not model.copy.evict_sent:
        placements.drop(node, node.placements[model.victim_of])  # that placement looks for room elsewhere
    if model.state == residency.READY:
        _done(node, event.model, None)
        return
    _wait_for_ready(node, model)


def unpin(node: Node, event: UnpinRequested) -> None:
    model = _find(node, event.model)
    if model is None:
        return
    pins.unpin(node, model)
    node.touch(model)
    if model.copy is not None:
        node.stir(model.copy.devices)
    _done(node, event.model, None)


def unload(node: Node, event: UnloadRequested) -> None:
    """Handles the command to evict a model now, which is answered when the model has been evicted. Its running requests wait at the
    front of the queue and may cause it to be loaded again. If the model is disabled or its folder is gone, all of its requests are
    refused instead. The command is refused if the model is pinned.

    `to` cold: nothing of the model stays in host memory. `to` warm: its weights in host memory stay, and KV worth saving is saved;
    refused if its weights are not there."""
    model = _find(node, event.model)
    if model is None:
        return
    if model.pinned:
        _done(node, event.model, Refusal("busy", f"{model.name} is pinned; unpin it first"))
        return
    if event.to == residency.WARM and not node.is_warm(model):
        message = f"no copy of {model.name} is in host memory ({node.host.num_slots} slots): it can only be unloaded to cold"
        _done(node, event.model, Refusal("not_kept", message))
        return
    node.answer_loads(model, Refusal("unloaded", f"{model.name} was unloaded by the operator"))
    node.touch(model)
    if model.copy is None and event.to == residency.COLD:
        keeping.drop_all(node, model, "unloaded by the operator")
    there = [one for one in model.replicas if one.copy is not None]
    for one in there:
        requests.pause(node, one)
    if model.leaves:
        node.reject_queue(model, admission.removed(model) if model.removed else admission.disabled(model))
    if not there:
        _done(node, event.model, None)
        return
    model.unload_causes.append(node.cause)
    for one in there:
        one.unload_to = event.to
        node.set_state(one, residency.DRAINING, "unloaded by the operator")
    for one in there:
        placements.evict(node, one)


def enable(node: Node, event: EnableRequested) -> None:
    model = _find(node, event.model)
    if model is None:
        return
    for one in model.replicas:
        one.enabled = True
        if one.state in (residency.DISABLED, residency.PAUSED):
            models.rest(node, one, "enabled by the operator")
    node.touch(model)
    _done(node, event.model, None)


def disable(node: Node, event: DisableRequested) -> None:
    """Handles the command to disable a model. Its waiting requests that have never run are refused. Running requests, and those
    that ran before and wait for the model to come back, are completed; then its copies are evicted. Meanwhile the model may still
    be evicted for overdue work of others."""
    model = _find(node, event.model)
    if model is None:
        return
    for one in model.replicas:
        one.enabled = False
    refusal = admission.disabled(model)
    node.reject_new(model, refusal)
    node.answer_loads(model, refusal)
    for one in model.replicas:
        if one.copy is None:
            models.rest(node, one, "disabled by the operator")
    node.touch(model)
    _done(node, event.model, None)


def drain(node: Node, event: DrainRequested) -> None:
    """Handles the command to refuse new requests for a model, or for the whole node if the command names none. Waiting and running
    requests continue."""
    node.stopping |= event.stopping
    _close(node, event.model, True)


def resume(node: Node, event: ResumeRequested) -> None:
    _close(node, event.model, False)


def _close(node: Node, name: str, closed: bool) -> None:
    if not name:
        node.draining = closed or node.stopping
        _done(node, "", None if closed else admission.gate(node))
        return
    model = _find(node, name)
    if model is not None:
        model.closed = closed
        model.story.tell(node.now, node.cause, "takes no new requests" if closed else "takes requests again")
        _done(node, name, None)


def waited_for_engines(node: Node, model: Model) -> None:
    """Refuses the commands that wait until a model is ready, if for max_wait_s fewer engines have been up than the model needs.
    Otherwise sets the deadline at which this is checked again."""
    if not model.load_causes:
        return
    limit_s = node.settings.max_wait_s
    until = node.now + limit_s
    if not node.has_engines(model):
        devices = {name for one in model.replicas for name in one.devices}
        until = max((node.devices[name].lost_at + limit_s for name in devices), default=node.now)
    if until > node.now:
        node.deadlines.set(("engines", model.name), until)
        return
    message = f"waited {limit_s:g} s for an engine (max_wait_s); {'; '.join(explain.obstacles(node, model))}"
    node.answer(model.load_causes, model.name, Refusal("wait_exceeded", message, admission.retry_after_s(node, model)))
    node.touch(model)


def _wait_for_ready(node: Node, model: Model) -> None:
    if not node.wanted(model):
        model.asked_at = node.now
    if not model.load_causes:
        node.deadlines.set(("engines", model.name), node.now + node.settings.max_wait_s)
    model.load_causes.append(node.cause)
    node.touch(model)


def _find(node: Node, name: str) -> Model | None:
    model = node.models.get(name)
    if model is None:
        _done(node, name, Refusal("model_not_found", f"no model {name!r} on this node"))
    elif model.primary is not model:
        message = f"{name} is a replica of {model.primary.name}, and commands are for the model"
        _done(node, name, Refusal("model_not_found", message))
        return None
    return model


def _done(node: Node, model: str, refusal: Refusal | None) -> None:
    node.emit(CommandDone(cause=node.cause, model=model, refusal=refusal))
