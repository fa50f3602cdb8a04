"""Checks the invariants of the node. An error names the violated invariant, by its number if it is one of the rules of
docs/design/models.md. O(everything): for tests, which check them after every event.
"""

from __future__ import annotations

from collections import Counter

from scheduler.node import leave_rules, look, pins, residency
from scheduler.node.groups import by_rank, is_group, kind_of, num_other_hosts
from scheduler.node.host_tier import KeptWeights
from scheduler.node.node import LOADS, VICTIMS_DRAIN, Copy, Device, Model, Node, Placement


def validate(node: Node) -> None:
    """Raises AssertionError if an invariant is violated. Must be called between events, never while one is handled."""
    assert not node.touched, "settled: touched models are left"
    assert not node.stirred, "settled: stirred devices are left"
    for model in node.models.values():
        check_model(node, model)
    for device in node.devices.values():
        check_device(node, device)
    placed = {request_id for model in node.models.values() for request_id in (*model.queue, *model.running)}
    assert placed == set(node.requests), "every request is in exactly one place: lost or forgotten ones"
    total = sum(len(model.queue) + len(model.running) for model in node.models.values())
    assert total == len(node.requests), "every request is in exactly one place: doubled ones"
    copies = {model.copy.placement_id: model.name for model in node.models.values() if model.copy}
    assert copies == node.copies, "every copy is known by its placement"
    placements = {model.placement.id: model.placement for model in node.models.values() if model.placement}
    assert placements == node.placements, "every placement belongs to one model"
    check_host(node)
    assert node.pinned.keys() <= node.models.keys(), "pinned list: models that are forgotten"


def check_model(node: Node, model: Model) -> None:
    name, copy = model.name, model.copy
    assert model.state in residency.ALL, f"state of {name}: {model.state!r}"
    assert (copy is not None) == (model.state in residency.IN_MEMORY), f"memory of {name}: {model.state} with copy {copy}"
    assert not model.running or model.state in residency.RUNNING or model.takes_requests, f"{name} has running requests"
    most = model.window * node.settings.window_per_sequence  # the window without other replicas, as it may have been
    assert len(model.running) <= most or model.state != residency.READY, f"window of {name}"
    if model.takes_requests:
        full = len(model.running) >= node.window(model)
        assert not model.primary.queue or full, f"rule 4: {name} takes requests and some wait"
    check_replicas(node, model)
    if model.state == residency.READY:
        assert not model.load_causes, f"commands wait for {name}, which is ready"
        assert not model.expected, f"requests for {name} are expected, which is ready"
        assert not model.leaves, f"{name} is ready but shall leave"
        assert model.victim_of == 0, f"rule 1: {name} is a ready victim"
    at = leave_rules.leaves_at(model)
    assert at is None or at > node.now, f"rule 11: the time of {name} is up and it stays"
    assert at is None or node.deadlines.get(("leave", name)) == at, f"rule 11: {name} has no deadline for leaving"
    assert ("leave", name) not in node.deadlines or copy is not None, f"rule 11: a deadline for {name}, which is not there"
    there = any(one.copy is not None for one in model.replicas)
    assert there or model.asked_keep_alive_s is None or node.wanted(model), f"rule 11: a stale keep_alive of {name}"
    if model.state in (residency.COLD, residency.WARM):
        assert (model.state == residency.WARM) == (node.is_warm(model) and not model.removed), f"{name} is {model.state}"
    assert model.state != residency.PAUSED or model.num_resubmissions, f"{name} is paused and nobody waits for it"
    if model.state in residency.CLOSED or model.leaves:
        served = model.served_elsewhere and not model.leaves
        only_old = not model.removed and model.state not in residency.CLOSED and model.num_resubmissions == len(model.queue)
        waits = served or only_old or model.state == residency.DRAINING
        assert waits or not model.queue, f"{name} is {model.state} and requests wait"
        assert not model.load_causes, f"{name} is {model.state} and commands wait"
        assert not model.expected, f"{name} is {model.state} and requests are expected"
    assert model.num_resubmissions == sum(request.resubmission for request in model.queue.values()), f"resubmissions of {name}"
    if model.queue or model.queue_of:
        check_lines(model)
    running = [request.facts.tenant for one in model.replicas for request in one.running.values()]
    active = model.primary.shares.active
    assert (not running and not active) or Counter(running) == active, f"shares of {name}"
    for request_id, request in model.queue.items():
        assert not request.device, f"request {request_id} is queued and submitted"
        assert request.model is model, f"request {request_id} waits elsewhere than it says"
        limited = not (request.resubmission or request.facts.part_of)
        assert not limited or request_id in node.waits, f"request {request_id} waits without limit"
    for request_id, request in model.running.items():
        assert copy is not None, f"request {request_id} runs without a copy"
        assert request.device == copy.leader, f"request {request_id} runs elsewhere than {name}"
        assert request.model is model, f"request {request_id} runs elsewhere than it says"
        assert request_id not in node.waits, f"request {request_id} runs with a wait limit"
    if copy is not None:
        check_members(node, model, copy)
        assert not (copy.evict_sent and model.running), f"rule 3: {name} is evicted with running requests"
        assert not copy.evict_sent or copy.overdue or ("evict", name) in node.deadlines, f"the eviction of {name} has no deadline"
    if model.state == residency.LOADING:
        assert ("load", name) in node.deadlines, f"rule 6: the load of {name} has no deadline"
    if model.victim_of:
        placement = node.placements.get(model.victim_of)
        assert placement is not None, f"rule 1: {name} drains for no placement"
        assert name in placement.victims, f"rule 1: {name} is not a victim of {placement.id}"
        assert not model.pinned or (copy is not None and copy.evict_sent), f"rule 7: {name} is pinned and a victim"
    if model.placement is not None:
        assert node.wanted(model) or model.placement.stage == LOADS, f"nobody waits for placement {model.placement.id} of {name}"
        check_placement(node, model.placement)
    assert model.pinned == (name in node.pinned), f"pinned list: {name}"
    if model.pinned:
        where = pins.place_of(model)
        assert where in ((), model.home), f"{name} is pinned to {model.home} and lives on {where}"
        rests = model.copy is None and model.placement is None
        assert not rests or is_group(model.home, model.facts.num_ranks, model.facts.num_stages), f"{name} is pinned to {model.home}"
    check_listed(node, model)


def check_lines(model: Model) -> None:
    """Checks that the tenants' parts of a model's queue are its queue."""
    name = model.name
    own = {tenant: list(line.requests) for tenant, line in model.queue_of.items()}
    by_tenant: dict[str, list[int]] = {}
    for request_id, request in model.queue.items():
        by_tenant.setdefault(request.facts.tenant, []).append(request_id)
    assert own == by_tenant, f"the tenants' parts of the queue of {name}"
    resubmissions = sum(line.num_resubmissions for line in model.queue_of.values())
    assert model.num_resubmissions == resubmissions, f"parts of {name}"


def check_members(node: Node, model: Model, copy: Copy) -> None:
    """Checks that a copy is recorded on all of its devices and on no other, and that a copy which has lost a device is being
    evicted."""
    name = model.name
    on = {device.name for device in node.devices.values() if device.resident.get(name) is model}
    assert copy.devices, f"the copy of {name} is on no device"
    assert on == set(copy.devices), f"{name} is on {copy.devices} and among the copies of {on}"
    assert len(on) == len(copy.devices), f"{name} is twice on one of {copy.devices}"
    assert copy.is_whole or copy.evict_sent, f"{name} is on {copy.devices} alone and stays"
    assert len(on) <= copy.facts.num_ranks, f"{name} is on {copy.devices}, too many for {copy.facts.num_ranks} shares"
    assert not copy.is_whole or is_group(copy.devices, copy.facts.num_ranks, copy.facts.num_stages), f"{name} on {copy.devices}"
    if copy.facts.is_split:
        check_group(name, copy.devices)
        if num_other_hosts(copy.devices):
            assert not copy.keep_slots, f"host tier: {name} has devices of other hosts, and is kept here"
            assert not copy.from_host, f"host tier: {name} has devices of other hosts, and is loaded from it"


def check_replicas(node: Node, model: Model) -> None:
    """Checks that a model's replicas share one queue, that of the primary, and have no device in common."""
    name, first = model.name, model.primary
    assert node.models.get(first.name) is first, f"rule 13: {name} is a replica of a model that is forgotten"
    assert (model.facts.replica_of or name) == first.name, f"rule 13: {name} is a replica of {first.name}"
    if model is not first:
        assert model in first.others, f"rule 13: {first.name} does not know its replica {name}"
        assert not model.queue, f"rule 13: requests wait for the replica {name}"
        assert not model.pinned, f"rule 13: the replica {name} is pinned"
        assert not model.load_causes, f"rule 13: a command waits for the replica {name}"
        assert name not in node.host.weights, f"rule 13: weights of the replica {name} are kept"
    if first.others:
        on = Counter(device for one in first.replicas for device in one.occupies)
        assert not on or max(on.values()) == 1, f"rule 13: replicas of {first.name} share a device: {dict(on)}"


def check_placement(node: Node, placement: Placement) -> None:
    """Checks that a placement is recorded on all of its devices and on no other, with the same promise or load on each."""
    name, devices = placement.model, [node.devices[device] for device in placement.devices]
    on = [device for device in node.devices.values() if device.placements.get(placement.id) is placement]
    assert {device.name for device in on} == set(placement.devices), f"placement {placement.id} is not on all of its devices"
    if placement.facts.is_split:
        check_group(name, placement.devices)
    if placement.stage != LOADS:
        assert is_group(placement.devices, placement.facts.num_ranks, placement.facts.num_stages), f"{name} on {placement.devices}"
    if placement.stage == LOADS:
        copy = node.models[name].copy
        assert copy is not None, f"placement {placement.id} loads nothing"
        assert copy.devices == placement.devices, f"placement {placement.id} of {name} loads onto other devices"
        assert all(device.loading is placement for device in devices), f"the load of {name} has not all of its loaders"
        return
    assert len(devices) == placement.facts.num_ranks, f"placement {placement.id} of {name} has too few devices"
    for device in devices:
        held = sum(device.ledger.held[victim].chunks for victim in placement.victims if victim in device.ledger.held)
        promised = max(0, placement.size.chunks - held), placement.size.work_space_chunks
        assert device.ledger.promised[placement.id] == promised, f"the promise of {device.name} to placement {placement.id}"
    for victim in placement.victims:
        assert any(victim in device.resident for device in devices), f"{victim} leaves for {name}, which goes elsewhere"


def check_group(name: str, devices: tuple[str, ...]) -> None:
    """Checks the devices that hold shares of a split model, all of them or those that remain after one was lost: they are sorted by
    rank and of one kind, and none is a carve-out."""
    ranks = sorted(devices, key=by_rank)
    assert list(devices) == ranks, f"the ranks of {name} on {devices}"
    kinds = {kind_of(device) for device in devices}
    assert len(kinds) == 1, f"{name} is on devices of several kinds: {devices}"
    assert "" not in kinds, f"{name} is on devices set aside for other models: {devices}"


def check_host(node: Node) -> None:
    node.host.validate()
    for name, copy in node.host.copies():
        model = node.models.get(name)
        assert model is not None, f"host tier: {name} is forgotten"
        of_shares = isinstance(copy, KeptWeights) and len(copy.checksums) == model.facts.num_ranks
        assert copy.void or of_shares or not model.facts.is_split, f"host tier: a copy of {name} is not of its shares"
        assert copy.void or copy.fingerprint == model.facts.fingerprint, f"host tier: an old copy of {name}"
        loads = model.placement is not None and model.placement.stage == LOADS
        assert not copy.lent or (loads and copy.lent == model.placement.id), f"host tier: a copy of {name} is lent to nobody"  # type: ignore[union-attr]
    for placement_id, transit in node.host.transit.items():
        assert node.copies.get(placement_id) == transit.model, f"host tier: slots in transit for {transit.model} are forgotten"


def check_listed(node: Node, model: Model) -> None:
    """Checks that one model is on the right devices' lists of waiting models (Device.by_age and by_work). Raises AssertionError if
    it is not. A model that waits to be placed must be on the lists of each device in Model.devices, which are the devices that may
    hold it and, when empty, have room for it (for a share of it, if it is split). If pinned models leave no room on a device, the
    model may be in the device's `crowded_out` instead. A model that does not wait to be placed must be on no list."""
    name = model.name
    listed = [device for device in node.devices.values() if name in device.by_age or name in device.by_work]
    assert all(name in device.by_age and name in device.by_work for device in listed), f"lists differ for {name}"
    known = {device.name for device in [*listed, *(one for one in node.devices.values() if name in one.crowded_out)]}
    waits = node.wanted(model) and node.resting(model) and model.retry_at <= node.now
    assert known <= set(model.devices if waits else ()), f"{name} is in line for {known}, wrongly"
    if not waits:
        return
    for name in model.devices:
        device = node.devices[name]
        in_line = device in listed or model.name in device.crowded_out
        assert in_line, f"{model.name} is wanted and not in line for {name}"


def check_device(node: Node, device: Device) -> None:
    name, ledger = device.name, device.ledger
    assert {model: size.chunks for model, size in ledger.held.items()} == {
        model.name: model.copy.size.chunks for model in device.resident.values() if model.copy
    }, f"rule 5: the ledger of {name} differs from its copies"
    assert ledger.held_chunks == sum(size.chunks for size in ledger.held.values()), f"rule 5: sum of {name}"
    assert ledger.held_chunks + ledger.work_space_chunks <= ledger.total_chunks, f"rule 5: {name} is overdrawn"
    held_work = max((size.work_space_chunks for size in ledger.held.values()), default=0)
    assert ledger.work_space_chunks >= held_work, f"rule 5: the work space of {name} is too small for its copies"
    assert set(ledger.promised) == {p.id for p in device.placements.values() if p.stage != LOADS}, f"promises of {name}"
    kept = device.pinned.chunks + device.pinned.work_space_chunks
    assert kept <= ledger.total_chunks, f"pins overdraw {name}"
    on_it = {id: placement for id, placement in node.placements.items() if name in placement.devices}
    assert device.placements == on_it, f"placements of {name}"
    if not device.up:
        assert not device.resident, f"{name} is down and has copies"
        assert not device.placements, f"{name} is down and has placements"
    loading = [placement for placement in device.placements.values() if placement.stage == LOADS]
    assert len(loading) <= 1, f"{name} loads several at once"
    assert (loading[0] if loading else None) is device.loading, f"loader of {name}"
    draining = [placement for placement in device.placements.values() if placement.stage == VICTIMS_DRAIN]
    assert len(draining) <= 1, f"{name} drains for several placements"
    for placement in device.placements.values():
        for victim in placement.victims:
            assert node.models[victim].victim_of == placement.id, f"{victim} is no victim of placement {placement.id}"
    for placement in draining:
        assert any(node.models[victim].running for victim in placement.victims), f"placement {placement.id} waits for nothing"
    if device.held_for:
        waiting = node.models[device.held_for]
        assert look.may_hold(node, waiting, device), f"{name} is held for {device.held_for}, but need not be"
    for model in list(device.by_age.keys()):
        if pins.fits_beside_pins(node.models[model], device):
            option = look.best_option(node, node.models[model], may_force=False)
            here = option is not None and name in option.devices
            assert not here or len(device.by_age) > 8, f"{model} could be placed on {name} and is not"
