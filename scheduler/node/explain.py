"""Makes the lines that `hearth why` prints: the story of a model or request, and what it waits for."""

from __future__ import annotations

from scheduler.node import leave_rules, look, replicas, residency
from scheduler.node.groups import joined
from scheduler.node.ledger import MIB
from scheduler.node.node import VICTIMS_DRAIN, VICTIMS_LEAVE, WAITS_FOR_LOADER, Model, Node


def why(node: Node, name: str) -> list[str]:
    """Returns the lines that `hearth why` prints for a model's name or a request's id (42 or req-42): what has happened, and what
    it waits for; [] if it is unknown."""
    model = node.models.get(name)
    if model is not None:
        return [
            *model.story.lines(node.now),
            f"now {model.state}: {model.reason}",
            *([f"takes no new requests; `hearth resume {name}` ends that"] if model.closed else []),
            *waits_for(node, model),
            *leave_rules.story(node, model),
            *replicas.story(node, model),
        ]
    digits = name.removeprefix("req-")
    if not digits.isdigit():
        return []
    request = node.requests.get(int(digits))
    if request is None:
        return node.ended.lines(int(digits), node.now)
    model = request.model
    lines = [f"{request.arrived - node.now:+.1f} s  request {digits} of {model.name} arrived"]
    if request.crashes:
        lines.append(f"was running in {request.crashes} crashes of its engine")
    if request.device:
        lines.append(f"{request.submitted_at - node.now:+.1f} s  submitted to {request.device}")
        return lines
    position = list(model.queue).index(int(digits))
    lines.append(
        f"waits{' again' if request.resubmission else ''}, {position} before it; {model.name} is {model.state}: {model.reason}"
    )
    return [*lines, *waits_for(node, model)]


def waits_for(node: Node, model: Model) -> list[str]:
    placement = model.placement
    if placement is not None:
        where = f"placement {placement.id} on {joined(placement.devices)}"
        if placement.stage == VICTIMS_DRAIN:
            busy = [f"{name} ({len(node.models[name].running)} requests)" for name in placement.victims]
            return [f"{where} waits for {', '.join(busy)} to finish"]
        if placement.stage == VICTIMS_LEAVE:
            return [f"{where} waits for the eviction of {', '.join(placement.victims)}"]
        if placement.stage == WAITS_FOR_LOADER:
            return [f"{where} waits for another load or eviction there"]
        if model.progress is None:
            return [f"{where} loads: nothing is read yet"]
        done, total = model.progress
        return [f"{where} loads: {done / MIB:.1f} of {total / MIB:.1f} MiB"]
    if model.state == residency.DRAINING:
        return [f"{len(model.running)} running requests to finish, then it leaves; {len(model.queue)} wait for it to come back"]
    if model.state == residency.READY and model.queue:
        return [f"{len(model.queue)} requests wait: {len(model.running)} are in the engine, its admission window is full"]
    if model.state not in residency.PLACEABLE or not node.wanted(model):
        return []
    if model.retry_at > node.now:
        return [f"the load is tried again in {model.retry_at - node.now:.1f} s"]
    return obstacles(node, model)


def obstacles(node: Node, model: Model) -> list[str]:
    """Returns a line for each of the model's devices that says why the model is not being placed there now."""
    return [obstacle(node, model, name) for name in model.devices] or ["no device is there yet"]


def obstacle(node: Node, model: Model, name: str) -> str:
    """Returns a line that says why the model, or a share of it, is not being placed on the device of this name now."""
    device = node.devices[name]
    if not device.up:
        return f"{name}: no engine is up"
    if not device.available:
        others = ", ".join(sorted(placement.model for placement in device.placements.values()))
        return f"{name}: the placement of {others} goes first"
    if device.held_for not in ("", model.name):
        others = " and for other devices" if node.models[device.held_for].facts.is_split else ", and its requests are overdue"
        return f"{name}: {device.held_for} waits for it{others}"
    if look.plan(node, model, (name,), may_force=False) is not None:
        if look.best_option(node, model, may_force=False) is not None:
            return f"{name}: other models' requests go first"
        return f"{name}: there is room for a share, but {model.facts.num_ranks} devices must have it at once"
    parts = []
    for other in device.resident.values():
        pinned = ", pinned" if other.pinned else ""
        parts.append(f"{other.name} ({other.state}{pinned}, {len(other.running)} running, {len(other.queue)} queued)")
    overdue_s = node.settings.overdue_after_s + node.reload_s(model, device)
    room = f"{name}: no room beside {', '.join(parts)}"
    return f"{room}; busy models are made to leave for requests that have waited {overdue_s:.1f} s (overdue_after_s and the load)"
