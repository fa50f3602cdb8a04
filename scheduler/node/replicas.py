"""Implements rule 13 of docs/design/models.md: further replicas of a model, each on other devices.

A model may have several replicas: the model itself, and further ones (`NAME#2`, `NAME#3` and so on). All requests wait in the
model's queue, and each goes to the replica that routing.py chooses. If a replica is evicted or its engine dies, its requests return
to the front of the queue, and another replica takes them.

A further replica is loaded while the model has requests (ModelFacts.replica_at says how many), one at a time, and into free memory:
no model is evicted for it. While several replicas are ready, all but the first are spare. Spare replicas are evicted for other
models' requests: idle ones before any other model, busy ones before other busy models and even if the requests are not overdue.
"""

from __future__ import annotations

from scheduler.node import admission, device_choice, look, placements, requests, residency
from scheduler.node.groups import joined
from scheduler.node.node import Device, Model, Node

KV_SHORT_S = 30.0  # how long a device gets no further replica after requests there have waited for KV


def spread(node: Node, model: Model) -> None:
    """Submits a model's waiting requests to its replicas, or refuses them if the model cannot be served. Then begins to load a
    further replica if one is wanted and there is room."""
    if model.queue:
        requests.submit_queued(node, model)
    if model.queue and not model.served_elsewhere and (refusal := admission.closed_to_all(node, model)) is not None:
        node.reject_queue(model, refusal)
    if (further := wanted(node, model)) is None:
        node.crowded_replicas.pop(model.name, None)
    elif node.crowded_replicas.get(model.name) != _room(node, model):
        _grow(node, model, further)


def wanted(node: Node, model: Model) -> Model | None:
    """Returns the replica of the model that should be loaded next in addition to those that are ready; None if none should be, or
    if one is being placed already."""
    if model.closed or model.removed or not model.enabled or not any(one.state == residency.READY for one in model.replicas):
        return None
    if any(one.placement is not None for one in model.replicas):
        return None
    num_requests = _requests(model)
    num_copies = sum(one.copy is not None for one in model.replicas)
    if not num_requests or num_requests < max(one.facts.replica_at for one in model.others) * num_copies:
        return None
    resting = (one for one in model.replicas if node.resting(one) and one.retry_at <= node.now and not one.leaves)
    return next(resting, None)


def _grow(node: Node, model: Model, further: Model) -> None:
    """Begins to load the replica `further` of the model, if enough memory is free and no other model waits for it. Otherwise
    records how much room there was, so that the load is tried again when that has changed."""
    options = [option for option in look.options(node, further, may_force=False) if not option.victims]
    options = [option for option in options if all(_is_quiet(node, node.devices[name]) for name in option.devices)]
    option = device_choice.choose(options)
    if option is None:
        node.crowded_replicas[model.name] = _room(node, model)
    else:
        node.crowded_replicas.pop(model.name, None)
        further.story.tell(node.now, node.cause, f"loads as another replica: {_requests(model)} requests of {model.name} are there")
        placements.begin(node, further, option)


def story(node: Node, model: Model) -> list[str]:
    """Returns the lines of `hearth why` about the other replicas of a model; [] if it has none."""
    if model.primary is not model:
        return [f"it is a replica of {model.primary.name}, where its requests wait"]
    lines = [f"replica {one.name}: {_where(one)}, {len(one.running)} requests run there" for one in model.others]
    if model.name in node.crowded_replicas:
        lines.append("another replica waits for free memory on a device that has no replica")
    return lines


def _where(model: Model) -> str:
    return f"{model.state} on {joined(model.copy.devices)}" if model.copy is not None else f"{model.state}: {model.reason}"


def _requests(model: Model) -> int:
    return len(model.queue) + sum(len(one.running) for one in model.replicas)


def _is_quiet(node: Node, device: Device) -> bool:
    """Returns whether nothing else needs the device's free memory: no model is in line, and no requests have waited for KV
    lately."""
    return not device.by_age and node.now >= device.kv_short_at + KV_SHORT_S


def look_again(node: Node) -> None:
    """Marks the models whose further replicas found no room and whose devices have changed since, so that `settle` tries to load
    these replicas again."""
    for name, room in node.crowded_replicas.items():
        if room != _room(node, node.models[name]):
            node.touched[name] = None


def _room(node: Node, model: Model) -> tuple[object, ...]:
    """Returns a snapshot of everything that decides whether there is room for a further replica. If two calls return equal values,
    a replica that found no room at the first call finds none at the second. O(devices)."""
    devices = (node.devices[name] for name in model.devices)
    state = tuple((one.available, one.held_for, one.ledger.lease_chunks, one.pinned, _is_quiet(node, one)) for one in devices)
    return (*state, *(one.occupies for one in model.replicas))
