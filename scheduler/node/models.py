"""Determines on which devices a model fits (rule 2 of docs/design/models.md) and which state it has while no copy of it is loaded;
sets quarantines."""

from __future__ import annotations

from scheduler.node import admission, keeping, pins, residency
from scheduler.node.groups import pools
from scheduler.node.ledger import arithmetic, size_of
from scheduler.node.node import Model, Node


def judge(node: Node, model: Model) -> None:
    """Determines on which devices a model, or a share of a split model, fits while they are empty, and sets its `devices` to them
    (rule 2 of docs/design/models.md). If there are none, or too few for all shares, also sets `too_large` to a text for operators
    with the sizes that shows why; else to "". O(devices)."""
    facts, settings = model.facts, node.settings
    model.size = size_of(facts, settings.chunk_bytes)
    need = model.size.chunks + model.size.work_space_chunks
    allowed = {name: device for name, device in node.devices.items() if not facts.devices or name in facts.devices}
    roomy = (name for name, device in allowed.items() if need <= device.ledger.total_chunks)
    model.devices = tuple(name for pool in pools(roomy, facts.num_ranks, facts.num_stages) for name in pool)
    model.too_large = ""
    if node.devices and not allowed:
        model.too_large = f"it may only live on {', '.join(facts.devices)}; this node has {', '.join(node.devices)}"
    elif node.devices and not model.devices:
        sums = arithmetic(facts, settings.chunk_bytes, {name: device.budget_bytes for name, device in allowed.items()})
        model.too_large = f"{sums}; {facts.if_too_large}" if facts.if_too_large else sums


def raise_work_space(node: Node, model: Model) -> None:
    """Enlarges the work space of the model's devices to what the model needs, on devices whose lease has room for that. On all
    other devices this is done when the model is placed there."""
    for name in model.devices:
        device = node.devices[name]
        if device.ledger.raise_work_space(model.size.work_space_chunks) and device.up:
            node.grant(device)


def rest(node: Node, model: Model, reason: str) -> None:
    """Sets the state of a model that has no copy on a device, such as cold, warm, refused or failed. Refuses its waiting requests
    and commands if it cannot be served in that state. reason: why it has no copy, for operators."""
    if model.removed:
        state, reason = residency.COLD, "its folder is gone"
    elif not model.enabled and not model.num_resubmissions:
        state, reason = residency.DISABLED, "by the operator"
    elif model.facts.incomplete:
        state, reason = residency.INCOMPLETE, model.facts.incomplete
    elif model.facts.unusable:
        state, reason = residency.HEAD if model.facts.drafts else residency.REFUSED, model.facts.unusable
    elif model.too_large:
        state, reason = residency.REFUSED, model.too_large
    elif model.failure:
        state, reason = residency.FAILED, model.failure
    elif model.paused or not model.enabled:
        disabled = "" if model.enabled else ", and no others are taken: it is disabled by the operator"
        state, reason = residency.PAUSED, f"{reason}; {model.num_resubmissions} requests wait for it to come back{disabled}"
    else:
        state = residency.WARM if node.is_warm(model) else residency.COLD
    node.set_state(model, state, reason)
    pins.check_home(node, model)
    shut, refusal = admission.closed(node, model), admission.closed_to_all(node, model)
    if refusal is not None:
        if model.removed or state != residency.FAILED or not model.served_elsewhere:
            node.reject_queue(model, refusal)
        node.answer_loads(model, refusal)
    elif shut is not None:
        node.reject_new(model, shut)
        node.answer_loads(model, shut)
    if not (model.enabled or model.removed or model.num_resubmissions or state == residency.DISABLED):
        rest(node, model, reason)  # the requests for which it was to come back have just been refused
        return
    if node.wanted_ahead(model):
        model.asked_at = node.now
    node.touch(model)


def forget(node: Node, model: Model) -> None:
    """Removes a model whose folder is gone. Must be called only if it has no copy, no placement under way and no further
    replicas."""
    for kind in ("retry", "quarantine", "load", "evict", "engines"):
        node.deadlines.discard((kind, model.name))
    for device in node.devices.values():
        if model.primary is model:
            device.costs.forget(model.name, model.facts.weights_bytes)
    keeping.drop_all(node, model, "its folder is gone")
    node.answer(model.unload_causes, model.name, None)
    node.set_state(model, "", "forgotten")
    del node.models[model.name]
    if model.primary is not model:
        model.primary.others.remove(model)
        node.touch(model.primary)  # the primary may wait to be forgotten, too
    node.touched.pop(model.name, None)
    node.crowded_replicas.pop(model.name, None)


# ---- failures


def note_failed_load(node: Node, model: Model, reason: str, permanent: bool) -> None:
    """Counts a failed load. permanent: True: the model is not tried again. False: it is tried again after 1, 2, 4, ... times the
    setting retry_load_s; after as many failures in a row as the setting failed_loads says, it is quarantined. reason: what went
    wrong, for operators. Must be called before the model's state is set to cold or warm."""
    settings = node.settings
    model.failed_loads += 1
    if permanent:
        model.failure, model.quarantined_until = reason, None
    elif model.failed_loads >= settings.failed_loads:
        quarantine(node, model, f"{model.failed_loads} loads failed in a row, the last because: {reason}")
    else:
        model.retry_at = node.now + settings.retry_load_s * 2 ** (model.failed_loads - 1)
        node.deadlines.set(("retry", model.name), model.retry_at)
        model.story.tell(node.now, node.cause, f"load failed ({reason}); again in {model.retry_at - node.now:g} s")


def note_crash(node: Node, model: Model) -> None:
    """Counts a fault of the model, after one of its requests was running in too many crashes of its engine. Quarantines the model
    if there have been too many faults lately."""
    settings, primary = node.settings, model.primary
    primary.faults = [at for at in primary.faults if at > node.now - settings.crash_window_s]
    primary.faults.append(node.now)
    if len(primary.faults) >= settings.crash_faults:
        primary.faults.clear()
        quarantine(node, model, f"its requests crashed an engine repeatedly ({settings.crash_faults} faults)")


def quarantine(node: Node, model: Model, reason: str) -> None:
    settings = node.settings
    pause_s = min(settings.quarantine_s * 2**model.num_quarantines, settings.max_quarantine_s)
    model.num_quarantines += 1
    model.failure, model.quarantined_until = reason, node.now + pause_s
    node.deadlines.set(("quarantine", model.name), model.quarantined_until)


def quarantine_over(node: Node, model: Model) -> None:
    """Ends a model's quarantine, so that it may be loaded once more; the next failure quarantines it again, for twice as long."""
    model.failure, model.quarantined_until = "", None
    model.failed_loads = node.settings.failed_loads - 1
    if model.copy is None and model.placement is None:
        rest(node, model, "quarantine over")


def clear_failure(node: Node, model: Model) -> None:
    model.failure, model.quarantined_until, model.retry_at = "", None, 0.0
    model.failed_loads = model.num_quarantines = 0
    model.faults.clear()
    for kind in ("retry", "quarantine"):
        node.deadlines.discard((kind, model.name))
