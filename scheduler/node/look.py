"""Chooses which model is placed next on a device, on which other devices if it is split, and which models are evicted for it, by
rules 7, 8 and 9 of docs/design/models.md.

A device can be held for a model (Device.held_for): no other model's placement then begins on it. It is held for the model whose
work is the longest overdue there, as long as that model waits for something that ends by itself, such as a load. There are two
reasons to hold a device. A split model needs several devices at the same moment, and one of them is occupied by a placement. Or a
model's work has been overdue for long: otherwise small models that come and go would use up the room again and again, and a large
model would never find enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.node import device_choice, eviction, pins, residency
from scheduler.node.eviction import Resident, Target
from scheduler.node.groups import groups, pools
from scheduler.node.node import Device, Model, Node, Placement

# How many models in line are looked at: one that can't be placed now must not block those behind it, but an event must stay cheap.
_NUM_CANDIDATES = 8


def next_option(node: Node, device: Device) -> tuple[Model, device_choice.Option] | None:
    """Returns which model to place next on this device, with the devices that it takes and the models that are evicted for it.
    Returns None if nothing can begin now; a deadline is set if the mere passing of time will change that.

    By rule 8, the model that has been overdue longest, of those that could be placed at all, comes first, and only it may force
    busy models out. All others follow in descending order of the number of their waiting requests divided by the seconds of their
    load. On a device that is held for a model, no other model is placed."""
    first = first_in_line(node, device)
    if first is None:
        return None
    overdue = first[0] <= node.now
    names = device.by_work.smallest(_NUM_CANDIDATES)
    if overdue:
        names = [first[1], *(name for name in names if name != first[1])]
    idle: dict[str, int] = {}
    for name in names:
        model = node.models[name]
        if not pins.fits_beside_pins(model, device):
            node.touch(model)  # pins have left it no room since: settling takes it off this device's list
            continue
        may_force = overdue and name == first[1]
        option = best_option(node, model, may_force, idle)
        if option is not None:
            return model, option
        if may_force:
            hold(node, model, device)  # before the others are looked at
    if not overdue:
        node.deadlines.set(("look", device.name), first[0])
    else:
        times = (next_forcible(node, node.models[first[1]]), _held_from(node, first[0]))
        again = min((at for at in times if at is not None and at > node.now), default=None)
        if again is not None:
            node.deadlines.set(("look", device.name), again)
    return None


def first_in_line(node: Node, device: Device) -> tuple[float, str] | None:
    """Returns the time, in monotonic seconds, at which the first model in line for the device becomes or became overdue, and its
    name; None if no model waits. A split model for which too few other devices are up is passed over, because it may wait for ever.
    O(1), or O(models in line) while the first one is passed over."""
    first = device.by_age.peek()
    if first is None or not _lacks_devices(node, node.models[first[1]], device):
        return first
    names = [name for name in device.by_age.keys() if not _lacks_devices(node, node.models[name], device)]  # noqa: SIM118
    return min(((at, name) for name in names if (at := device.by_age.get(name)) is not None), default=None)


def _lacks_devices(node: Node, model: Model, device: Device) -> bool:
    """Returns whether a split model cannot be placed on this device now, whichever models are evicted: too few further devices for
    its other shares have an engine and enough room beside their pinned models. False for a model that is not split."""
    if not model.facts.is_split:
        return False
    others = (node.devices[name] for name in model.devices)
    able = (one.name for one in others if one is device or (one.up and pins.fits_beside_pins(model, one)))
    return not any(device.name in pool for pool in pools(able, model.facts.num_ranks, model.facts.num_stages))


def best_option(node: Node, model: Model, may_force: bool, idle: dict[str, int] | None = None) -> device_choice.Option | None:
    """Returns the best option to place a model now; None if there is none. may_force: whether busy models may be forced out if it
    cannot be placed otherwise. idle: a cache that is shared by the models compared at one time: device -> number of chunks that its
    idle models hold."""
    found = options(node, model, False, idle)
    if not found and may_force:
        found = options(node, model, True)
    return device_choice.choose(found)


def options(node: Node, model: Model, may_force: bool, idle: dict[str, int] | None = None) -> list[device_choice.Option]:
    """Returns the ways to place the model now, one for each device that could take it. A split model's options are groups of
    devices that have room for a share; the best devices are combined first, and the number of groups is limited
    (groups.MAX_GROUPS). may_force: whether busy models may be forced out. idle: a cache, device -> number of chunks that its idle
    models hold."""
    members = [member for name in model.devices if (member := member_on(node, model, name, may_force, None, idle)) is not None]
    alone = [option for member in members if (option := option_on(model, [member])) is not None]
    if not model.facts.is_split:
        return alone
    by_name = {member.device.name: member for member in members}
    preferred = [option.devices[0] for option in sorted(alone, key=device_choice.rank)]
    together = groups(preferred, model.facts.num_ranks, model.facts.num_stages)
    found = (option_on(model, [by_name[name] for name in group]) for group in together)
    return [option for option in found if option is not None]


def hold(node: Node, model: Model, device: Device) -> None:
    """Holds the device for a model that cannot be placed there now, if `may_hold` allows it: no other model's placement then begins
    there. For a split model, each of its devices is held for which `may_hold` allows it, because another model could otherwise
    begin on them."""
    devices = [node.devices[name] for name in model.devices] if model.facts.is_split else [device]
    for one in devices:
        if one.name not in node.released and may_hold(node, model, one):
            one.held_for = model.name


def may_hold(node: Node, model: Model, device: Device) -> bool:
    """Returns whether the device may be held for the model, so that no other model's placement begins there. The model must be the
    longest overdue there, and must wait for something that ends by itself, such as a load. A model that is not split holds at most
    one device. A split model holds every device that could hold a share of it."""
    first = first_in_line(node, device)
    if not device.up or first is None or first[1] != model.name or first[0] > node.now:
        return False
    if waits_for_others(node, model):
        return True
    if node.now < _held_from(node, first[0]):
        return False
    if not model.facts.is_split:
        elsewhere = any(node.devices[name].held_for == model.name for name in model.devices if name != device.name)
        return not elsewhere and _will_have_room(node, model, device)
    able = (name for name in model.devices if _will_have_room(node, model, node.devices[name]))
    return any(device.name in pool for pool in pools(able, model.facts.num_ranks, model.facts.num_stages))


def _held_from(node: Node, overdue_at: float) -> float:
    """Returns the time, in monotonic seconds, from which a device may be held for a model whose work became overdue at overdue_at,
    so that no other model's placement begins there. Until then other models may begin there: this keeps the loaders busy, which
    shortens the mean wait if all models wait for loads."""
    return overdue_at + node.settings.overdue_after_s


def _will_have_room(node: Node, model: Model, device: Device) -> bool:
    """Returns whether the model, or a share of it, could be placed on the device once the loads under way there have ended, if all
    models there that are not pinned may be evicted, busy ones too."""
    if not device.up or device.held_for not in ("", model.name) or not pins.fits_beside_pins(model, device):
        return False
    if any(device.name in one.occupies for one in model.replicas if one is not model):
        return False
    staying = [one.copy.size for one in device.resident.values() if one.copy is not None and one.pinned]
    work_space = max((model.size.work_space_chunks, *(size.work_space_chunks for size in staying)))
    return sum(size.chunks for size in staying) + model.size.chunks + work_space <= device.ledger.total_chunks


def waits_for_others(node: Node, model: Model) -> bool:
    """Returns whether a split model waits for devices that are occupied by placements: enough of its devices have engines, but too
    few of these are free."""
    up = [name for name in model.devices if node.devices[name].up]
    free = (name for name in up if node.devices[name].available)
    division = model.facts.num_ranks, model.facts.num_stages
    return bool(pools(up, *division)) and not pools(free, *division)


@dataclass(slots=True)
class _Member:
    """One of the devices onto which a model would be loaded, with the memory that the model needs on it and the copies that are
    there now."""

    device: Device
    target: Target
    residents: list[Resident]


def plan(
    node: Node, model: Model, devices: tuple[str, ...], may_force: bool, instead: Placement | None = None
) -> device_choice.Option | None:
    """Returns the option to place the model on exactly these devices now, with the models that would have to be evicted; None if it
    cannot be placed there. may_force: whether busy models may be forced out, which only one placement of a device at a time does.
    instead: a placement under way that the new one would replace, so that its room counts as free and its idle victims may be
    evicted; None: there is none."""
    members = [member for name in devices if (member := member_on(node, model, name, may_force, instead, None)) is not None]
    return option_on(model, members) if len(members) == len(devices) else None


def option_on(model: Model, members: list[_Member]) -> device_choice.Option | None:
    """Returns the option to place a model on all of the devices `members` together, with the models that would have to be evicted;
    None if evictions cannot free enough room."""
    chosen = eviction.victims_on_all([(member.target, member.residents) for member in members])
    if chosen is None:
        return None
    lease_chunks = min(member.device.ledger.lease_chunks for member in members)
    left = any(model.name in member.device.left for member in members)
    return device_choice.Option(tuple(member.device.name for member in members), chosen, lease_chunks, left)


def member_on(
    node: Node, model: Model, name: str, may_force: bool, instead: Placement | None, idle: dict[str, int] | None
) -> _Member | None:
    """Returns the device of this name with the memory that the model, or its share of a split model, would need there, and the
    copies that are there now. Returns None if the device is not available, or would have too little memory even after all models
    that may be evicted are. may_force: whether busy models may be forced out. instead: a placement under way that the new one would
    replace, so that its room counts as free and its idle victims may be evicted; None: there is none. idle: a cache, device ->
    number of chunks that its idle models hold."""
    device = node.devices[name]
    if not device.available or device.held_for not in ("", model.name) or not pins.fits_beside_pins(model, device):
        return None
    if model.primary.others and any(name in one.occupies for one in model.replicas if one is not model):
        return None
    if may_force and device.draining is not None:
        return None

    def may_leave(resident: Model) -> bool:
        return evictable(node, resident, may_force, instead) or may_drain(device, resident)

    ledger = device.ledger
    work_space = model.size.work_space_chunks
    for other, (_, promised) in ledger.promised.items():
        if instead is None or other != instead.id:
            work_space = max(work_space, promised)
    room = ledger.room_for(instead.id if instead else 0)
    movable = None if idle is None else idle.get(device.name)
    if movable is None:
        movable = 0
        for resident in device.resident.values():
            if may_leave(resident):
                movable += resident.copy.size.chunks  # type: ignore[union-attr]
        if idle is not None:
            idle[device.name] = movable
    if ledger.held_chunks - movable + model.size.chunks + work_space > room:
        return None
    residents = [describe(node, device, resident, may_leave(resident)) for resident in device.resident.values()]
    return _Member(device, Target(model.size.chunks, work_space, room), residents)


def evictable(node: Node, model: Model, may_force: bool, instead: Placement | None) -> bool:
    """Returns whether a model may be evicted for another one. It must not be pinned. It must be ready, or stay only until its last
    requests have ended. If it is busy, may_force must be set, and it must have been loaded for long enough to be forced out (rules
    1, 7 and 9 of docs/design/models.md).

    instead: a placement that the new one would replace; its idle victims, which are being evicted already, may be evicted, too.
    None: there is none."""
    if not _serves(model):
        copy = model.copy
        chosen = instead is not None and model.victim_of == instead.id and copy is not None and not copy.evict_sent
        return chosen and not model.running
    if model.pinned:
        return False
    if not (model.running or model.queue):
        return True
    if not may_force:
        return False
    return model.copy is not None and node.now >= model.copy.tenure_ends


def _serves(model: Model) -> bool:
    """Returns whether the model has a copy on its device that runs requests and may become a victim: it is ready, or it stays only
    until its last requests have ended, because it is disabled or its folder is gone."""
    return model.state == residency.READY or model.runs_out


def may_drain(device: Device, model: Model) -> bool:
    """Returns whether a busy model may be evicted, once its requests have ended, for work that is not overdue. This requires that
    another of its replicas stays and that nothing else drains on the device (rule 13 of docs/design/models.md)."""
    return model.is_spare and model.state == residency.READY and device.draining is None


def describe(node: Node, device: Device, model: Model, may_leave: bool) -> Resident:
    copy = model.copy
    assert copy is not None
    chunks = copy.size.chunks
    worth = score(node, model, device, chunks) if may_leave else 0.0
    busy = _serves(model) and bool(model.running or model.queue)
    return Resident(
        model.facts.name, chunks, copy.size.work_space_chunks, worth, model.last_used or 0.0, evictable=may_leave, busy=busy
    )


def score(node: Node, model: Model, device: Device, chunks: int) -> float:
    """Returns the value of a model on a device, by which the models to evict are chosen (the one with the lowest value is evicted
    first). It is the seconds of reloading per second that the model's absence from the device is expected to cost, times its
    priority, per byte that its eviction frees. It is 0 for a spare replica, because another replica goes on serving the model.
    chunks: how many chunks the model's eviction frees."""
    if model.is_spare:
        return 0.0
    reload_s = node.reload_s(model, device)
    return eviction.value(
        model.facts.priority, model.primary.arrivals.per_s(node.now), reload_s, chunks * node.settings.chunk_bytes
    )


def next_forcible(node: Node, model: Model) -> float | None:
    """Returns the next time, in monotonic seconds, at which a busy model on one of the model's devices has been loaded for long
    enough to be forced out; None if there is no such time in the future."""
    times = (
        other.copy.tenure_ends
        for name in model.devices
        for other in node.devices[name].resident.values()
        if other.copy is not None and _serves(other) and (other.running or other.queue)
    )
    return min((at for at in times if at > node.now), default=None)
