"""Who is placed next on a device, where and at whose cost: rules 7, 8 and 9."""

from __future__ import annotations

from scheduler.node import eviction, pins, placement, residency
from scheduler.node.eviction import Resident, Target
from scheduler.node.node import Device, Model, Node, Placement

# A model that can't be placed now must not hide those behind it; nor may an event look at all of them.
_NUM_CANDIDATES = 8


def next_option(node: Node, device: Device) -> tuple[Model, placement.Option] | None:
    """Rule 8: the longest waiting one if it is overdue (and only that one may force busy models out), else the most waiting work
    per reload second. None: nothing can begin here now; a deadline is set if only time will change that."""
    oldest = device.by_age.peek()
    if oldest is None:
        return None
    overdue = oldest[0] + node.settings.overdue_after_s <= node.now
    names = device.by_work.smallest(_NUM_CANDIDATES)
    if overdue:
        names = [oldest[1], *(name for name in names if name != oldest[1])]
    for name in names:
        model = node.models[name]
        if not pins.fits_beside_pins(model, device):
            node.touch(model)  # pins have come since: settling takes it off this device's list
            continue
        option = best_option(node, model, may_force=overdue and name == oldest[1])
        if option is not None:
            return model, option
    if not overdue:
        node.deadlines.set(("look", device.name), oldest[0] + node.settings.overdue_after_s)
    else:
        again = next_forcible(node, node.models[oldest[1]])
        if again is not None:
            node.deadlines.set(("look", device.name), again)
    return None


def best_option(node: Node, model: Model, may_force: bool) -> placement.Option | None:
    devices = [node.devices[name] for name in model.devices]
    options = [option for device in devices if (option := plan(node, model, device, False)) is not None]
    if not options and may_force:
        options = [option for device in devices if (option := plan(node, model, device, True)) is not None]
    return placement.choose(options)


def plan(node: Node, model: Model, device: Device, may_force: bool, instead: Placement | None = None) -> placement.Option | None:
    """What would have to leave the device now. `instead` of a placement under way: its room and idle victims count as free.
    Only one placement of a device forces at a time."""
    if not device.available or not pins.fits_beside_pins(model, device):
        return None
    if may_force and device.draining is not None:
        return None
    ledger = device.ledger
    promised = [work for other, (_, work) in ledger.promised.items() if instead is None or other != instead.id]
    target = Target(
        chunks=model.size.chunks,
        work_space_chunks=max([model.size.work_space_chunks, *promised]),
        room_chunks=ledger.room_for(instead.id if instead else 0),
    )
    chunk_bytes = node.settings.chunk_bytes
    residents = []
    evictable_chunks = 0
    for other in device.resident.values():
        copy = other.copy
        assert copy is not None
        busy = bool(other.running or other.queue)
        if instead is not None and other.victim_of == instead.id:
            evictable, busy = not (other.running or copy.evict_sent), False
        else:
            evictable = other.state == residency.READY and not other.pinned
            if evictable and busy:
                evictable = may_force and (
                    other.forced_at is None or node.now >= other.forced_at + node.force_every_s(other, device)
                )
        if evictable:
            evictable_chunks += copy.size.chunks
        resident = Resident(other.facts.name, copy.size.chunks, copy.size.work_space_chunks, 0.0, 0.0, evictable, busy)
        residents.append(resident)
    if ledger.held_chunks - evictable_chunks + target.chunks + target.work_space_chunks > target.room_chunks:
        return None
    work_space = max([target.work_space_chunks, *(resident.work_space_chunks for resident in residents)])
    if ledger.held_chunks + target.chunks + work_space > target.room_chunks:
        for resident in residents:
            if resident.evictable:
                rate_victim(node, device, resident, chunk_bytes)
    chosen = eviction.victims(target, residents)
    return None if chosen is None else placement.Option(device.name, chosen, ledger.lease_chunks)


def rate_victim(node: Node, device: Device, resident: Resident, chunk_bytes: int) -> None:
    model = node.models[resident.name]
    resident.last_used = model.last_used or 0.0
    resident.value = eviction.value(
        model.facts.priority, model.arrivals.per_s(node.now), node.reload_s(model, device), resident.chunks * chunk_bytes
    )


def next_forcible(node: Node, model: Model) -> float | None:
    """When a busy model on one of its devices may be forced out again."""
    times = (
        other.forced_at + node.force_every_s(other, node.devices[name])
        for name in model.devices
        for other in node.devices[name].resident.values()
        if other.forced_at is not None and (other.running or other.queue)
    )
    return min((at for at in times if at > node.now), default=None)
