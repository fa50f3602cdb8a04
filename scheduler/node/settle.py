"""Carries out the consequences of an event: each model that the event has touched takes every step it can, then models are placed
on each device whose room or demand has changed."""

from __future__ import annotations

from scheduler.node import leave_rules, look, models, pins, placements, replicas, requests, residency
from scheduler.node.node import Model, Node


def settle(node: Node) -> None:
    _settle(node)
    while stale := [
        device
        for device in node.devices.values()
        if device.held_for and not look.may_hold(node, node.models[device.held_for], device)
    ]:
        for device in stale:
            device.held_for = ""
            node.released[device.name] = None  # not held again in this event, so that this ends
        node.stir(device.name for device in stale)
        _settle(node)
    node.released.clear()


def _settle(node: Node) -> None:
    while node.touched or node.stirred or node.newcomers:
        while node.touched:
            name, _ = node.touched.popitem()
            model = node.models.get(name)
            if model is not None:
                settle_model(node, model)
        if node.stirred:
            name, _ = node.stirred.popitem()
            placements.place_next(node, node.devices[name])
            if node.crowded_replicas:
                replicas.look_again(node)
        elif node.newcomers:
            name, _ = node.newcomers.popitem()
            if name in node.models:
                placements.place_newcomer(node, node.models[name])


def settle_model(node: Node, model: Model) -> None:
    if model.primary.others:
        replicas.spread(node, model.primary)
    copy = model.copy
    if copy is None:
        settle_resting(node, model)
        return
    if model.state == residency.DRAINING and not (copy.evict_sent or model.victim_of or model.leaves):
        node.set_state(model, residency.READY, "stays after all")
    if model.leaves and (model.state == residency.READY or (model.state == residency.LOADING and not _finishes(model))):
        if model.state == residency.LOADING:
            requests.recall(node, model)
        node.set_state(model, residency.DRAINING, model.why_leaves)
    if model.state == residency.READY:
        node.answer_loads(model, None)
        if model.primary.queue:
            requests.submit_queued(node, model.primary)
        if not model.running:  # it is idle, so another model may take its room
            node.stir(copy.devices)
            leave_rules.apply(node, model)
    elif model.takes_requests and model.primary.queue:
        requests.submit_queued(node, model.primary)
    elif model.state == residency.DRAINING and not model.running:
        if model.victim_of:
            placements.advance(node, node.placements[model.victim_of])
        else:
            placements.evict(node, model)


def _finishes(model: Model) -> bool:
    """Returns whether a disabled model is loaded (or is to be) only to complete requests that ran before and were interrupted."""
    return model.comes_back or (not model.removed and any(request.resubmission for request in model.running.values()))


def settle_resting(node: Node, model: Model) -> None:
    if not model.num_resubmissions:  # no request waits for it to come back any more
        model.paused = False
        if model.state == residency.PAUSED:
            models.rest(node, model, "its paused requests have ended")
    elif model.state == residency.DISABLED:  # another replica, which has left, ran them
        models.rest(node, model, model.why_leaves)
    placement = model.placement
    if placement is not None:
        devices = [node.devices[name] for name in placement.devices]
        room_kept = not all(pins.fits_beside_pins(model, device) for device in devices)  # a pin has been set since
        if model.state in residency.PLACEABLE and node.wanted(model) and not room_kept:
            placements.advance(node, placement)
        else:
            placements.drop(node, placement)
    elif model.removed:
        placements.unlist(node, model)
        if not model.others:
            models.forget(node, model)
        elif model.state != residency.COLD:  # a primary is forgotten after its replicas, which use its queue while they drain
            models.rest(node, model, "its folder is gone")
    else:
        enlist(node, model)
    if not node.wanted(model) and all(one.copy is None for one in model.replicas):  # or pins have just left it no room
        model.asked_keep_alive_s = None  # a request's keep_alive applies to one stay on a device


def enlist(node: Node, model: Model) -> None:
    """Puts a model that waits to be placed on the waiting lists of all devices on which it fits beside pinned models, in the order
    of rule 8 of docs/design/models.md. Removes a model that does not wait from these lists. If pinned models leave no room for a
    waiting model and no other replica serves it, its requests and commands are refused."""
    if not node.wanted(model) or not node.resting(model) or model.retry_at > node.now:
        placements.unlist(node, model)
        return
    num_waiting = max(1, len(model.queue))
    crowded = False
    for name in model.devices:
        device = node.devices[name]
        if pins.fits_beside_pins(model, device):
            reload_s = node.reload_s(model, device)
            device.by_age.set(model.name, node.overdue_at(model, reload_s))
            device.by_work.set(model.name, -num_waiting / reload_s)
            node.newcomers[model.name] = None
        else:
            crowded = True
            if model.name in device.by_age:
                device.by_age.discard(model.name)
                device.by_work.discard(model.name)
                node.stirred[name] = None
            device.crowded_out[model.name] = None
    if crowded and not pins.has_place(node, model) and not model.served_elsewhere:
        refusal = pins.would_not_fit(node, model)
        node.reject_queue(model, refusal)
        node.answer_loads(model, refusal)
        placements.unlist(node, model)
