"""Adds copies of the hottest experts to the loads of split mixture-of-experts models, if memory is free for them.

The daemon chooses the experts to copy (scheduler/expert_copies.py) by how many tokens have passed through each. A load takes the
copies only if all its devices have the memory free when it begins, and if no other model is in line for one of them. No model is
evicted and no KV is dropped for copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from scheduler.node import pins
from scheduler.node.events import CopiesChosen
from scheduler.node.ledger import Size, size_of
from scheduler.node.node import Device, Model, Node, Placement


def chosen(node: Node, event: CopiesChosen) -> None:
    """Records which copies of experts the next loads of a model take if there is room. Unknown models are ignored."""
    model = node.models.get(event.model)
    if model is not None:
        model.primary.expert_copies = event.copies


def take(node: Node, placement: Placement) -> None:
    """Adds the copies of experts that were chosen for a model to its placement, which begins to load, if all its devices have free
    memory for them."""
    model = node.models[placement.model]
    copies = model.primary.expert_copies
    if copies is None or not placement.facts.is_split:
        return
    if why := _obstacle(node, model, placement.devices, placement.id):
        model.story.tell(node.now, node.cause, f"loads without copies of experts: {why}")
        return
    placement.facts = replace(placement.facts, weights_bytes=copies.weights_bytes)
    placement.size = size_of(placement.facts, node.settings.chunk_bytes)
    placement.copies = copies
    model.story.tell(node.now, node.cause, f"loads with {_told(copies.number)}")


def outlook(node: Node, model: Model, devices: tuple[str, ...], leaving: Collection[str]) -> str:
    """Returns a text for operators that says whether a load of the model on these devices would take copies of experts now; "" if
    no copies are chosen or the model is not split. leaving: the models that would be evicted for the load."""
    copies = model.primary.expert_copies
    if copies is None or not model.facts.is_split:
        return ""
    why = _obstacle(node, model, devices, 0, leaving)
    return f"without copies of experts: {why}" if why else f"with {_told(copies.number)}"


def _told(number: int) -> str:
    return f"up to {number} further expert{'s' if number > 1 else ''} in each layer on each device"


def _obstacle(node: Node, model: Model, devices: Iterable[str], placement_id: int, leaving: Collection[str] = ()) -> str:
    """Returns why there is no room for the copies chosen for a model, naming the device; "" if there is room on all `devices`.
    placement_id: the model's placement there; 0: it has none yet. leaving: models there whose memory counts as free."""
    copies = model.primary.expert_copies
    assert copies is not None
    size = size_of(replace(model.facts, weights_bytes=copies.weights_bytes), node.settings.chunk_bytes)
    for name in devices:
        device = node.devices[name]
        if len(device.by_age) > (model.name in device.by_age):
            return f"another model is in line for {name}"
        if (missing := _missing(node, model, device, size, placement_id, leaving)) > 0:
            return f"{name} has {missing} chunks too few free"
    return ""


def _missing(node: Node, model: Model, device: Device, size: Size, placement_id: int, leaving: Collection[str]) -> int:
    """Returns how many more chunks would have to be free on a device to place a model of this size; 0 or less if there are enough.
    Memory that pinned models need, loaded or not, counts as taken, and so does all memory that KV takes now, cached prefixes
    included. placement_id: the model's placement there; 0: it has none yet. leaving: models there whose memory counts as free."""
    ledger, chunk_bytes = device.ledger, node.settings.chunk_bytes
    promised = sum(chunks for other, (chunks, _) in ledger.promised.items() if other != placement_id)
    work_space = max(ledger.work_space_chunks, size.work_space_chunks)
    used, kv_bytes = promised + work_space, 0
    for other in device.resident.values():
        assert other.copy is not None
        if other.name not in leaving:
            used += other.copy.size.chunks
            kv_bytes += max(0, other.kv_bytes - other.copy.size.kv_chunks * chunk_bytes)
    used += -(-kv_bytes // chunk_bytes)
    pinned = device.pinned.chunks - (pins.size_kept(model).chunks if device.name in model.home else 0)
    of_pins = size.chunks + pinned + max(work_space, device.pinned.work_space_chunks) - ledger.total_chunks
    return max(used + size.chunks - ledger.total_chunks, of_pins)
