"""Carries out placements. A placement brings one model onto a device, or onto several if it is split, after its victims, the models
that are evicted for it, are gone.

First the victims drain and are evicted. Then the placement waits until its devices' loaders are free, and loads. From the Load
action on, the placement's id also names the copy on the devices, until the copy's eviction is answered.

While a placement waits for busy victims to drain, it can be dropped. The victims then become ready again, because nothing has been
taken from them. After their Evict actions they are evicted even if the placement is dropped.

A placement begins on all of its devices at once or on none, and so does its load. Two placements can therefore never wait for each
other, each with a part of what the other needs.
"""

from __future__ import annotations

from scheduler.node import expert_copies, keeping, look, pins, preemption, residency
from scheduler.node.actions import Evict, Load, RestartEngine
from scheduler.node.device_choice import Option
from scheduler.node.events import EvictFinished
from scheduler.node.groups import joined
from scheduler.node.models import rest
from scheduler.node.node import LOADS, VICTIMS_DRAIN, VICTIMS_LEAVE, WAITS_FOR_LOADER, Copy, Device, Model, Node, Placement

# ---- beginning


def place_next(node: Node, device: Device) -> None:
    """Begins every placement that can begin on a device whose free memory, or whose waiting models, have changed. Begins the load
    of each placement there that waited for the device's loader and need not wait any longer. Sends the engine its new KV lease (the
    chunks that it may use for KV beyond its models' reserves) if that has grown."""
    if not device.up:
        return
    device.held_for = ""  # until next_option below finds that it is still held
    for waiting in list(device.placements.values()):
        if waiting.stage == WAITS_FOR_LOADER:
            advance(node, waiting)
    draining = device.draining
    if draining is not None and device.available:
        model = node.models[draining.model]
        option = look.plan(node, model, draining.devices, may_force=False, instead=draining)
        if option is not None:  # other models have become idle, so the busy victims need not leave after all
            drop(node, draining)
            begin(node, model, option)
    while device.available and (found := look.next_option(node, device)) is not None:
        begin(node, *found)
    if device.ledger.lease_chunks > device.lease_sent_chunks:  # a model has left, or a placement was dropped
        node.grant(device)


def place_newcomer(node: Node, model: Model) -> None:
    """Begins a placement of a model that has just come to need one (a request or a command waits for it), if there is room for it.
    Other models are not considered, because nothing has changed for them.

    If there is no room, the model is considered again later. On each of its devices, a deadline is set for the time at which the
    first waiting model becomes overdue. A device is marked as one on which placements are to be tried (Node.stirred) if this model
    is the first there and overdue already, or if the device is held for this model."""
    if not node.resting(model) or not any(model.name in node.devices[name].by_age for name in model.devices):
        return
    option = look.best_option(node, model, may_force=False)
    if option is not None:
        begin(node, model, option)
        return
    for name in model.devices:
        first = look.first_in_line(node, node.devices[name])
        if node.devices[name].held_for == model.name:
            node.stirred[name] = None  # another model may be the longest overdue now
        if first is not None:
            if first[0] > node.now:
                if ("look", name) not in node.deadlines:
                    node.deadlines.set(("look", name), first[0])
            elif first[1] == model.name:
                node.stirred[name] = None


def begin(node: Node, model: Model, option: Option) -> None:
    node.num_placements += 1
    placement = Placement(
        id=node.num_placements,
        model=model.name,
        devices=option.devices,
        size=model.size,
        facts=model.facts,
        cause=node.cause,
        forced=option.forced,
        victims=dict.fromkeys(victim.name for victim in option.victims),
    )
    unlist(node, model)
    model.placement = node.placements[placement.id] = placement
    for name in placement.devices:
        node.devices[name].placements[placement.id] = placement
    if model.pinned and model.home != placement.devices:
        pins.move_home(node, model, placement.devices)
    node.history.begun(node.now, placement, option, model.facts.weights_bytes, node.now - node.waits_since(model))
    leaving = f", in place of {', '.join(placement.victims)}" if placement.victims else ""
    model.story.tell(node.now, node.cause, f"placement {placement.id} on {joined(placement.devices)}{leaving}")
    for resident in option.victims:
        victim = node.models[resident.name]
        victim.victim_of = placement.id
        node.set_state(victim, residency.DRAINING, f"makes room for {model.name} (placement {placement.id})")
    promise(node, placement)
    if placement.forced:
        preemption.foresee(node, placement)
    advance(node, placement)


def promise(node: Node, placement: Placement) -> None:
    """Reserves on each device of a placement the chunks that the placement needs beyond those that its victims still hold there."""
    for name in placement.devices:
        ledger = node.devices[name].ledger
        held = sum(ledger.held[victim].chunks for victim in placement.victims if victim in ledger.held)
        ledger.promise(placement.id, placement.size.chunks - held, placement.size.work_space_chunks)


def advance(node: Node, placement: Placement) -> None:
    """Moves a placement to the latest stage that it can reach now. The stages wait, in this order, for busy victims to drain, for
    victims to be evicted, and for the devices' loaders to be free. If there is nothing to wait for, the load begins."""
    if placement.stage == VICTIMS_DRAIN:
        if any(node.models[name].running for name in placement.victims):
            return
        placement.stage = VICTIMS_LEAVE
        node.deadlines.discard(("preempt", placement.model))
        for name in list(placement.victims):
            evict(node, node.models[name])
    if placement.stage == VICTIMS_LEAVE and not placement.victims:
        placement.stage = WAITS_FOR_LOADER
    if placement.stage == WAITS_FOR_LOADER and all(may_load(node.devices[name], placement) for name in placement.devices):
        load(node, placement)


def may_load(device: Device, placement: Placement) -> bool:
    return device.loading is None and device.ledger.has_room(placement.id, placement.size)


def drained_too_long(node: Node, model: Model) -> None:
    """Pauses the busy victims of the model's placement, whose time to drain is over, so that the placement can reach its next
    stage."""
    placement = model.placement
    if placement is not None and placement.stage == VICTIMS_DRAIN:
        preemption.pause_victims(node, placement)
        advance(node, placement)


def set_load_deadline(node: Node, copy: Copy) -> float:
    """Sets the deadline of the load that is to bring a copy to its devices, and returns the seconds until then: the setting
    load_deadline_s; if that is None, the larger of 20 s and four times the predicted seconds of the load."""
    facts, deadline_s = copy.facts, node.settings.load_deadline_s
    if deadline_s is None:
        predicted_s = max(node.devices[name].costs.predict_s(facts.costs_name, facts.weights_bytes) for name in copy.devices)
        deadline_s = max(20.0, 4 * predicted_s)
    node.deadlines.set(("load", facts.name), node.now + deadline_s)
    copy.counted_to = node.now
    return deadline_s


def load(node: Node, placement: Placement) -> None:
    model, devices = node.models[placement.model], [node.devices[name] for name in placement.devices]
    model.loads.note(node.now)
    num_left = sum(model.name in device.left for device in devices)
    left = num_left == len(devices)
    expert_copies.take(node, placement)  # first, because shares with copies of experts use no host memory
    keep, kept, saved = keeping.grants_of_load(node, placement, left)
    about_s = node.slowest_reload_s(model, placement.devices)
    placement.stage = LOADS
    model.copy = Copy(placement.id, placement.devices, placement.facts, placement.size, keep, kept is not None)
    model.copy.expert_copies = 0 if placement.copies is None else placement.copies.number
    model.copy.requested = bool(model.queue or model.expected)
    model.progress = None
    node.copies[placement.id] = model.name
    for device in devices:
        hold(node, device, placement)
    deadline_s = set_load_deadline(node, model.copy)
    source = "what was left there" if left else "disk and what was left there" if num_left else "host memory" if kept else "disk"
    where = joined(placement.devices)
    node.set_state(model, residency.LOADING, f"placement {placement.id} on {where} from {source}, about {about_s:.1f} s")
    leader, *others = devices
    node.emit(
        Load(
            cause=node.cause,
            placement_id=placement.id,
            model=model.name,
            device=leader.name,
            weights_chunks=placement.size.weights_chunks,
            kv_reserved_chunks=placement.size.kv_chunks,
            lease_chunks=leader.lease_sent_chunks,
            further=tuple((other.name, other.lease_sent_chunks) for other in others),
            deadline_s=deadline_s,
            fingerprint=placement.facts.fingerprint,
            source_slots=kept.slots if kept else (),
            checksums=kept.checksums if kept else (),
            keep_slots=keep,
            kv_slots=saved.slots if saved else (),
            kv_index=saved.index if saved else b"",
            reason=_why_loaded(model),
            expert_copies=() if placement.copies is None else placement.copies.table,
        )
    )


def hold(node: Node, device: Device, placement: Placement) -> None:
    """Takes the memory and the loader of one device for a placement whose load begins there, and records the model as resident on
    the device."""
    model, ledger = node.models[placement.model], device.ledger
    ledger.withdraw(placement.id)
    ledger.hold(model.name, placement.size)
    if model.size.work_space_chunks > ledger.work_space_chunks:
        ledger.raise_work_space(model.size.work_space_chunks)
    device.left.discard(model.name)
    device.loading = placement
    device.resident[model.name] = model
    if model.pinned:
        pins.recount(node, device)
    device.lease_sent_chunks = ledger.lease_chunks


def _why_loaded(model: Model) -> str:
    """Returns why a model is loaded onto its devices, as one of the keys of actions.LOAD_REASONS."""
    if model.queue and not model.served_elsewhere:
        return "resumed" if model.num_resubmissions else "request"
    if model.expected:
        return "request"
    if model.load_causes:
        return "operator"
    return "pinned" if model.pinned else "replica"


def drop(node: Node, placement: Placement, reason: str = "") -> None:
    """Gives up a placement before it loads. Victims for which no Evict action was sent become ready again, and the memory reserved
    for the placement returns to the device's KV lease (the chunks for KV beyond the models' reserves). reason: the outcome to
    record in the history; "": the stage that the placement was in."""
    model = node.models[placement.model]
    undo(node, placement)
    outcome = f"dropped while its {placement.stage}" if placement.victims else "dropped"
    node.history.ended(placement.id, node.now, reason or outcome)
    model.story.tell(node.now, node.cause, f"placement {placement.id} dropped ({reason or placement.stage})")
    for name in placement.victims:
        victim = node.models[name]
        victim.victim_of = 0
        assert victim.copy is not None
        if not victim.copy.evict_sent:
            if victim.leaves:
                node.set_state(victim, residency.DRAINING, victim.why_leaves)
            else:
                node.set_state(victim, residency.READY, f"{model.name} does not need its room any more")
        node.touch(victim)
    for name in placement.devices:
        node.devices[name].ledger.withdraw(placement.id)
    node.touch(model)


def undo(node: Node, placement: Placement) -> None:
    """Removes a placement, which has ended or is given up, from the records of the node, the model and all its devices. The caller
    must release the memory that the placement holds or was promised."""
    model = node.models[placement.model]
    del node.placements[placement.id]
    for name in placement.devices:
        leave_device(node.devices[name], placement)
    model.placement = None
    node.deadlines.discard(("load", model.name))
    node.deadlines.discard(("preempt", model.name))
    node.stir(placement.devices)
    node.stir_held()


def leave_device(device: Device, placement: Placement) -> None:
    """Removes a placement from the records of one device, and frees the device's loader if the placement had it."""
    del device.placements[placement.id]
    if device.loading is placement:
        device.loading = None


def unlist(node: Node, model: Model) -> None:
    """Removes a model from its devices' lists of waiting models, because it does not wait to be placed any more."""
    for name in model.devices:
        device = node.devices[name]
        if model.name in device.by_age:
            first = look.first_in_line(node, device)
            if (first is not None and first[1] == model.name) or device.held_for == model.name:
                node.stirred[name] = None  # the next in line may find room where this one could not
            device.by_age.discard(model.name)
            device.by_work.discard(model.name)
        device.crowded_out.pop(model.name, None)


# ---- leaving


def evict(node: Node, model: Model) -> None:
    """Evicts a model's copy, whose requests have ended or are back in the queue. If the copy is still being loaded, this cancels
    the load. Does nothing if the copy is being evicted already."""
    copy = model.copy
    assert copy is not None
    assert not model.running, f"{model.name} has running requests"
    if copy.evict_sent:
        return
    copy.evict_sent = True
    node.deadlines.discard(("load", model.name))
    devices = [node.devices[name] for name in copy.devices]
    save = keeping.grants_of_eviction(node, model, copy)
    leader, *others = devices
    save_s = len(save) * node.settings.chunk_bytes / leader.costs.copy_bytes_per_s
    node.deadlines.set(("evict", model.name), node.now + node.settings.evict_deadline_s + 4 * save_s)
    copy.counted_to = node.now
    for device in devices:
        device.lease_sent_chunks = lease_after_evictions(device)
    node.emit(
        Evict(
            cause=node.cause,
            placement_id=copy.placement_id,
            model=model.name,
            device=leader.name,
            lease_chunks=leader.lease_sent_chunks,
            further=tuple((other.name, other.lease_sent_chunks) for other in others),
            save_slots=save,
            reason=_why_evicted(model, copy),
            to=residency.WARM if node.is_warm(model) and model.unload_to != residency.COLD else residency.COLD,
            age_s=0.0 if copy.ready_at is None else node.now - copy.ready_at,
        )
    )


def _why_evicted(model: Model, copy: Copy) -> str:
    """Returns why a copy is evicted from its devices, as one of the keys of leave_rules.EVICT_REASONS."""
    if not copy.is_whole:
        return "share_lost"
    if model.removed:
        return "removed"
    if model.unload_to or not (model.enabled or model.paused):
        return "operator"
    if copy.rolling_back:
        return "rolled_back"
    if model.gives_kv:
        return "kv"
    if model.leaves_by:
        return model.leaves_by
    return "preempted" if model.paused else "room"


def lease_after_evictions(device: Device) -> int:
    """Returns the KV lease of a device (the number of chunks that its engine may use for KV beyond the models' reserves) that
    applies once every copy with an Evict action has been evicted. It does not include memory that is freed for a placement."""
    ledger = device.ledger
    held = 0
    for model in device.resident.values():
        assert model.copy is not None
        if not model.copy.evict_sent:
            held += model.copy.size.chunks
    promised = 0
    for placement in device.placements.values():
        if placement.stage != LOADS:
            staying = sum(_held_still(device, name) for name in placement.victims)
            promised += max(0, placement.size.chunks - staying)
    return max(0, ledger.total_chunks - ledger.work_space_chunks - held - promised)


def _held_still(device: Device, name: str) -> int:
    model = device.resident.get(name)  # a victim on other devices of the placement need not be on this one
    copy = None if model is None else model.copy
    return copy.size.chunks if copy is not None and not copy.evict_sent else 0


def evict_finished(node: Node, event: EvictFinished) -> None:
    """Handles the engine's answer to an Evict action: records the saved KV and frees the copy's memory. Unknown ids are ignored:
    they belong to evictions that ended when their engine died."""
    name = node.copies.get(event.placement_id)
    if name is None:
        return
    model = node.models[name]
    copy = model.copy
    if copy is not None and copy.evict_sent:
        keeping.saved(node, model, copy, event.kv_slots, event.kv_index, event.saved_kv_tokens)
        release(node, model, "evicted")


def release(node: Node, model: Model, reason: str) -> None:
    """Frees the memory of a model's copy and sets the state of the model, which then has no copy. If the copy was evicted for a
    placement, continues that placement. reason: why the copy has gone, for operators."""
    copy = model.copy
    assert copy is not None
    for name in copy.devices:
        device = node.devices[name]
        device.ledger.release(model.name)
        del device.resident[model.name]
    del node.copies[copy.placement_id]
    if model.placement is not None:
        undo(node, model.placement)
        node.history.ended(copy.placement_id, node.now, reason)
    for kind in ("evict", "leave"):
        node.deadlines.discard((kind, model.name))
    keeping.copy_ended(node, model, copy)
    model.copy, model.progress, model.unload_to, model.leaves_by, model.gives_kv = None, None, "", "", False
    model.kv_bytes = model.kv_running_bytes = 0
    placement = node.placements.get(model.victim_of)
    model.victim_of = 0
    if placement is not None:
        del placement.victims[model.name]
        promise(node, placement)
        node.touch(node.models[placement.model])
    if not any(one.unload_to for one in model.replicas if one.copy is not None):
        node.answer(model.primary.unload_causes, model.primary.name, None)
    node.stir(copy.devices)
    rest(node, model, reason)


def lose_share(node: Node, model: Model, device: Device, reason: str) -> None:
    """Handles the loss of a copy's memory on one device, whose engine has died. The shares on other devices cannot be used any
    more: they are evicted, and their memory counts as held until the eviction is answered. Their weights stay in place until
    something else takes the memory, so that a new load onto the same devices is fast."""
    copy, placement = model.copy, model.placement
    assert copy is not None
    if copy.devices == (device.name,):
        release(node, model, reason)
        return
    device.ledger.release(model.name)
    del device.resident[model.name]
    copy.devices = tuple(name for name in copy.devices if name != device.name)
    if copy.ready_at is not None:
        for name in copy.devices:
            node.devices[name].left.add(model.name)
    if placement is not None:
        leave_device(device, placement)
        placement.devices = copy.devices
        node.history.ended(placement.id, node.now, reason)
    if not copy.evict_sent:
        node.set_state(model, residency.DRAINING, f"{reason}; its other shares leave")
        evict(node, model)


def evict_overdue(node: Node, model: Model) -> None:
    """Restarts the engines of all devices of a copy whose eviction has missed its deadline, because it is unknown which of the
    engines has not answered. Only an overdue roll-back makes the node unhealthy."""
    copy = model.copy
    assert copy is not None
    what = "roll-back" if copy.rolling_back else "eviction"
    reason = f"{what} of {model.name} (placement {copy.placement_id}) overdue"
    copy.overdue = True
    model.story.tell(node.now, node.cause, f"{reason}; {joined(copy.devices)} is restarted")
    for name in copy.devices:
        if copy.rolling_back:
            node.devices[name].problem = f"{name}: {reason}"
        node.emit(RestartEngine(cause=node.cause, device=name, reason=reason))
