"""Shows what a placement would do now without doing it, with the same scores and choice of victims as a real one."""

from __future__ import annotations

from scheduler.node import admission, eviction, expert_copies, explain, leave_rules, look, pins, residency
from scheduler.node.device_choice import Option
from scheduler.node.eviction import Target
from scheduler.node.groups import joined
from scheduler.node.node import Device, Model, Node
from scheduler.node.views import CandidateView, DevicePlan, LoadPlan

FITS, EVICTS, FORCES, WAITS, THERE, REFUSED = "fits", "evicts", "forces", "waits", "there", "refused"


def load(node: Node, model: Model) -> LoadPlan:
    """Returns what loading the model would do now, without doing it. The plan evicts busy models only if there is no room
    otherwise, as for an overdue request. O(residents)."""
    refusal = admission.removed(model) if model.removed else admission.closed(node, model)
    if refusal is None and model.copy is None and not pins.has_place(node, model):
        refusal = pins.would_not_fit(node, model)
    devices = [node.devices[name] for name in model.devices]
    if refusal is not None:
        has_size = not (model.facts.unusable or model.facts.incomplete)
        plans = tuple(_on_device(node, model, device, None) for device in devices) if has_size else ()
        return _plan(node, model, REFUSED, refusal.message, (), plans)
    if model.copy is not None or model.placement is not None:
        where = model.copy or model.placement
        assert where is not None
        reason = "; ".join([model.reason, *explain.waits_for(node, model)])
        return _plan(node, model, THERE, reason, where.devices, ())
    chosen = look.best_option(node, model, may_force=True)
    of_chosen = chosen.devices if chosen is not None else ()
    options = [chosen if device.name in of_chosen else _option(node, model, device) for device in devices]
    plans = tuple(_on_device(node, model, device, option) for device, option in zip(devices, options, strict=True))
    if chosen is None:
        return _plan(node, model, WAITS, "; ".join(plan.reason for plan in plans) or "no device is there yet", (), plans)
    verdict, reason = _verdict(node, chosen)
    outlook = expert_copies.outlook(node, model, chosen.devices, {victim.name for victim in chosen.victims})
    return _plan(node, model, verdict, f"{reason}; {outlook}" if outlook else reason, chosen.devices, plans)


def room(node: Node, device: Device, num_bytes: int) -> DevicePlan:
    """Returns which idle models would have to be evicted from the device so that num_bytes become free there, in addition to its
    work space. Busy models are never among them."""
    chunks = -(-num_bytes // node.settings.chunk_bytes)
    room_chunks = device.ledger.room_for(0)
    residents = [
        look.describe(node, device, resident, look.evictable(node, resident, may_force=False, instead=None))
        for resident in device.resident.values()
    ]
    chosen = eviction.victims(Target(chunks, device.ledger.work_space_chunks, room_chunks), residents)
    option = None if chosen is None else Option((device.name,), chosen, device.ledger.lease_chunks)
    waits = f"{device.name}: what is idle does not free so much"
    return _device_plan(node, device, option, chunks, waits)


def _option(node: Node, model: Model, device: Device) -> Option | None:
    """Returns how the model, or one share of a split model, could be placed on this device; None if it cannot. The option evicts
    busy models only if there is no option without that."""
    return look.plan(node, model, (device.name,), may_force=False) or look.plan(node, model, (device.name,), may_force=True)


def _plan(node: Node, model: Model, verdict: str, reason: str, devices: tuple[str, ...], plans: tuple[DevicePlan, ...]) -> LoadPlan:
    on = devices or model.devices[:1]
    return LoadPlan(
        model=model.name,
        state=model.state,
        verdict=verdict,
        reason=reason,
        device=joined(devices),
        source="host" if node.is_warm(model) else "disk",
        load_s=node.slowest_reload_s(model, on) if on else 0.0,
        devices=plans,
    )


def _on_device(node: Node, model: Model, device: Device, option: Option | None) -> DevicePlan:
    return _device_plan(node, device, option, model.size.chunks, explain.obstacle(node, model, device.name))


def _device_plan(node: Node, device: Device, option: Option | None, chunks: int, waits: str) -> DevicePlan:
    ledger, chunk_bytes = device.ledger, node.settings.chunk_bytes
    verdict, reason = (WAITS, waits) if option is None else _verdict(node, option)
    victims = {victim.name for victim in option.victims} if option is not None else set()
    candidates = [_candidate(node, device, model, model.name in victims) for model in device.resident.values()]
    return DevicePlan(
        device=device.name,
        verdict=verdict,
        reason=reason,
        needed_bytes=chunks * chunk_bytes,
        free_bytes=ledger.lease_chunks * chunk_bytes,
        total_bytes=ledger.total_chunks * chunk_bytes,
        candidates=tuple(sorted(candidates, key=lambda one: (not one.victim, one.score, one.name))),
    )


def _verdict(node: Node, option: Option) -> tuple[str, str]:
    """Returns what carrying out an option to place a model would take (FITS, EVICTS or FORCES), and a sentence for operators that
    explains it."""
    where, names = joined(option.devices), ", ".join(victim.name for victim in option.victims)
    if option.forced:
        overdue_s = node.settings.overdue_after_s
        return FORCES, f"{where}: {names} would be made to leave, once a request has waited {overdue_s:g} s and the load's"
    return (EVICTS, f"{where}: {names} would leave") if names else (FITS, f"{where} has room")


def _candidate(node: Node, device: Device, model: Model, victim: bool) -> CandidateView:
    copy = model.copy
    assert copy is not None
    busy = bool(model.running or model.queue)
    return CandidateView(
        name=model.name,
        state=model.state,
        score=look.score(node, model, device, copy.size.chunks),
        requests_per_s=model.primary.arrivals.per_s(node.now),
        reload_s=node.reload_s(model, device),
        freed_bytes=copy.size.chunks * node.settings.chunk_bytes,
        idle_s=None if busy or model.last_used is None else node.now - model.last_used,
        active=len(model.running),
        queued=len(model.queue),
        victim=victim,
        reason=_why(node, device, model, victim, busy),
    )


def _why(node: Node, device: Device, model: Model, victim: bool, busy: bool) -> str:
    if model.pinned:
        return "stays: pinned"
    if model.state == residency.LOADING:
        return "stays: it is loading"
    if victim:
        return "leaves: busy, made to" if busy else "leaves: idle, least to lose"
    if model.state != residency.READY:
        return f"{model.state}: {model.reason}"
    if not busy:
        leaves = leave_rules.next_of(model)
        until = "" if leaves is None else f", and leaves in {max(0.0, leaves[0] - node.now):.0f} s {leaves[1].by}"
        return f"stays: idle, its room is not needed{until}"
    if not look.evictable(node, model, True, None):
        return "stays: busy, and came a short while ago"
    return "stays: busy"
