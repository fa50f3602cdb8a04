"""Handles starts and deaths of engines. When an engine dies, its device's account is emptied, and all its requests return to the
front of their queues. A model that is split over this device and others is evicted from the others, too.
"""

from __future__ import annotations

from scheduler.node import admission, kv_room, models, pins, placements, requests, residency
from scheduler.node.costs import LoadCosts
from scheduler.node.events import EngineDown, EngineUp, KVNoted, PrefillMeasured, StepLasts
from scheduler.node.ledger import DeviceLedger
from scheduler.node.node import LOADS, Device, Node


def declare(node: Node, name: str, budget_bytes: int) -> Device:
    """Adds a device to the node and returns it, whether or not its engine has started. The caller must then call `judge_all`,
    unless there are no models yet."""
    settings = node.settings
    device = Device(
        name=name,
        budget_bytes=budget_bytes,
        ledger=DeviceLedger(budget_bytes // settings.chunk_bytes),
        costs=LoadCosts(settings.bandwidth_bytes_per_s, settings.load_overhead_s, settings.copy_bytes_per_s),
    )
    node.devices[name] = device
    return device


def up(node: Node, event: EngineUp) -> None:
    device = node.devices.get(event.device)
    if device is not None and device.up:
        end(node, device, (), "ended: a new one has come up")
    if device is None:
        device = declare(node, event.device, event.budget_bytes)
        judge_all(node)
    elif device.budget_bytes != event.budget_bytes:
        device.budget_bytes = event.budget_bytes
        device.ledger = DeviceLedger(event.budget_bytes // node.settings.chunk_bytes)
        judge_all(node)
    device.up, device.problem, device.left = True, "", set(event.left)
    node.grant(device)
    node.stir(node.devices)  # split models that lacked this device come into line on the others


def judge_all(node: Node) -> None:
    """Determines again for every model on which devices it fits, because a device is new or its budget has changed."""
    for model in node.models.values():
        placements.unlist(node, model)
        models.judge(node, model)
        models.raise_work_space(node, model)
        if model.copy is None and model.placement is None:
            models.rest(node, model, "devices have changed")
        elif pins.place_of(model) == ():  # it leaves those of its devices that are left
            pins.check_home(node, model)


def down(node: Node, event: EngineDown) -> None:
    device = node.devices.get(event.device)
    if device is not None and device.up:
        end(node, device, event.running, event.reason)


def end(node: Node, device: Device, running: tuple[int, ...], reason: str) -> None:
    """Handles the death of a device's engine: models on the device lose their copies, and their requests wait again. running: ids
    of the requests of the step that was running when the engine died. One more crash is counted for each of them; if there are
    none, a load that was under way counts as failed. reason: what happened, for operators."""
    device.up, device.held_for, device.lost_at = False, "", node.now
    reason = f"the engine of {device.name} {reason}"
    for placement in list(device.placements.values()):
        if placement.stage != LOADS:
            for name in [name for name in placement.victims if name in device.resident]:  # only these are gone
                del placement.victims[name]
                node.models[name].victim_of = 0
            placements.drop(node, placement, reason)
    in_flight = set(running)
    for model in list(device.resident.values()):
        assert model.copy is not None
        if model.state == residency.LOADING and not in_flight:
            models.note_failed_load(node, model, reason, permanent=False)
        for request in list(model.running.values()):
            if request.facts.request_id in in_flight:
                request.crashes += 1
                if request.crashes >= node.settings.max_crashes:
                    requests.crashed(node, model, request)
                    models.note_crash(node, model)
        lost = list(model.running.values())
        requests.take_back(node, model, lost)
        if not model.enabled and not model.served_elsewhere:  # it may have been disabled because engines die of it
            for request in lost:
                node.reject(model.primary.dequeue(request.facts.request_id), admission.disabled(model))
        placements.lose_share(node, model, device, reason)
    device.ledger.clear()
    node.stir(node.devices)  # split models that lack this device now leave the line on the others


def kv_noted(node: Node, event: KVNoted) -> None:
    for name, (running_bytes, cached_bytes) in event.kv_bytes.items():
        model = node.models.get(name)
        if model is not None and model.copy is not None and model.copy.leader == event.device:
            model.kv_bytes, model.kv_running_bytes = running_bytes + cached_bytes, running_bytes
    device = node.devices.get(event.device)
    if device is not None and any(event.waiting.values()):
        kv_room.widen(node, device, event.waiting, event.without_room, event.adapter_bytes)


def step_lasts(node: Node, event: StepLasts) -> None:
    """Postpones the deadlines of loads and evictions on a device whose engine is in a long step, by the time that the step has
    taken, because the engine cannot answer loads and evictions during a step. If several engines of a split model are in long steps
    at the same time, that time counts once."""
    device = node.devices.get(event.device)
    for model in device.resident.values() if device is not None else ():
        assert model.copy is not None
        lasted_s = node.now - max(event.since, model.copy.counted_to)
        for key in (("load", model.name), ("evict", model.name)):
            if lasted_s > 0.0 and (due := node.deadlines.get(key)) is not None:
                node.deadlines.set(key, due + lasted_s)
                model.copy.counted_to = node.now


def prefill_measured(node: Node, event: PrefillMeasured) -> None:
    device = node.devices.get(event.device)
    if device is not None and event.model in node.models:
        device.costs.learn_prefill(event.model, event.num_tokens, event.seconds)
