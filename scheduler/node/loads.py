"""Handles what the engine reports about a load, and loads that miss their deadline."""

from __future__ import annotations

from scheduler.node import keeping, requests, residency
from scheduler.node.actions import Refusal
from scheduler.node.admission import retry_after_s
from scheduler.node.events import LoadFailed, LoadFinished, LoadProgressed, LoadStreams
from scheduler.node.groups import joined
from scheduler.node.models import note_failed_load
from scheduler.node.node import Copy, Model, Node
from scheduler.node.placements import evict, release, set_load_deadline, undo

NOTABLE_KERNELS_S = 0.5


def load_finished(node: Node, event: LoadFinished) -> None:
    model = _loading(node, event.placement_id)
    if model is None:
        return
    copy, placement = model.copy, model.placement
    assert copy is not None
    assert placement is not None
    undo(node, placement)
    if event.source_rejected:
        model.story.tell(node.now, node.cause, f"its copy in host memory was not used: {event.source_rejected}")
    if event.read_as:
        model.story.tell(node.now, node.cause, event.read_as)
    source = _source(copy, event)
    seconds, weights_bytes = event.seconds - event.kernels_s, copy.facts.weights_bytes
    for device in copy.devices:
        costs = node.devices[device].costs
        if source == "host":
            costs.learn_from_host(model.facts.costs_name, weights_bytes, seconds, event.copy_s)
        elif source == "disk":
            costs.learn(model.facts.costs_name, weights_bytes, seconds)
    keeping.load_ended(node, model, copy, event.checksums if event.kept else None)
    copy.ready_at = node.now
    copy.tenure_ends = node.now + node.tenure_s(model, copy.devices)
    node.history.ended(copy.placement_id, node.now, "ready", event.seconds, source)
    model.paused = False
    model.failed_loads = model.num_quarantines = 0
    model.progress = None
    node.set_state(model, residency.READY, _how(copy, event))
    node.touch(model)


def _source(copy: Copy, event: LoadFinished) -> str:
    """Returns where the weights of a load came from: "device" if they, or those of a share, were still in the device's memory;
    "host" for host memory; or "disk"."""
    if event.adopted:
        return "device"
    return "host" if copy.from_host and not event.source_rejected else "disk"


def _how(copy: Copy, event: LoadFinished) -> str:
    left = "with weights that were left on its devices" if copy.facts.is_split else "its weights taken over from the engine before"
    source = {"host": " from host memory", "device": f", {left},"}.get(_source(copy, event), "")
    restored = f", KV of {event.restored_kv_tokens} tokens with it" if event.restored_kv_tokens else ""
    kernels = f", {event.kernels_s:.2f} s of it for kernels" if event.kernels_s >= NOTABLE_KERNELS_S else ""
    return f"loaded{source} in {event.seconds:.2f} s{kernels}{restored}"


def load_streams(node: Node, event: LoadStreams) -> None:
    model = _loading(node, event.placement_id)
    if model is None:
        return
    assert model.copy is not None
    model.copy.streams = True
    model.story.tell(node.now, node.cause, "prompts run behind its weights")
    node.touch(model)


def load_progressed(node: Node, event: LoadProgressed) -> None:
    model = _loading(node, event.placement_id)
    if model is None:
        return
    if event.bytes_total:
        model.progress = (event.bytes_done, event.bytes_total)
    elif ("load", model.name) in node.deadlines:  # it waits for kernels: its time begins then
        assert model.copy is not None
        set_load_deadline(node, model.copy)
        node.kernel_waits.reported(model.copy.devices, node.now)


def load_failed(node: Node, event: LoadFailed) -> None:
    """Handles a failed load: counts the failure, queues its requests again and frees its memory. If the load was being rolled back,
    the failure is not counted, and the roll-back ends with it."""
    name = node.copies.get(event.placement_id)
    model = node.models[name] if name else None
    if model is None or model.state not in (residency.LOADING, residency.DRAINING) or model.placement is None:
        return
    assert model.copy is not None
    if not model.copy.evict_sent:
        note_failed_load(node, model, event.reason, event.permanent)
    if model.copy.from_host:
        node.host.drop_weights(model.name)  # it may be what is wrong
    requests.recall(node, model)
    release(node, model, f"load failed: {event.reason}")


def _loading(node: Node, placement_id: int) -> Model | None:
    """Returns the model that this placement is loading; None if the placement is unknown or the load is being rolled back."""
    name = node.copies.get(placement_id)
    if name is None or node.models[name].state != residency.LOADING:
        return None
    return node.models[name]


def load_overdue(node: Node, model: Model) -> None:
    """Handles a load that has missed its deadline: begins to roll it back, and refuses the requests and commands that waited for it
    (rule 6 of docs/design/models.md)."""
    copy = model.copy
    assert copy is not None
    reason = f"placement {copy.placement_id} on {joined(copy.devices)} missed its deadline"
    copy.rolling_back = True
    node.set_state(model, residency.DRAINING, f"{reason}; rolling back")
    requests.recall(node, model)
    refusal = Refusal("load_timeout", f"the load of {model.name} missed its deadline", retry_after_s(node, model))
    if not model.served_elsewhere:
        node.reject_queue(model.primary, refusal)
    node.answer_loads(model, refusal)
    note_failed_load(node, model, reason, permanent=False)
    evict(node, model)
    node.touch(model)
