"""Registers, changes and removes models as their folders appear, change and disappear."""

from __future__ import annotations

from scheduler.node import admission, keeping, models, pins, residency
from scheduler.node.events import ModelFacts, ModelRegistered, ModelRemoved
from scheduler.node.ledger import size_of
from scheduler.node.node import Model, Node
from scheduler.node.placements import drop, unlist


def registered(node: Node, event: ModelRegistered) -> None:
    """Handles the event that a model is new, or has new files or settings. A copy of it on a device does not change; the new facts
    apply from the next load on. Raises KeyError for a further replica whose model is not registered yet."""
    facts = event.facts
    model = node.models.get(facts.name)
    if model is None:
        model = Model(facts=facts, size=size_of(facts, node.settings.chunk_bytes), devices=())
        if facts.replica_of:
            model.primary = node.models[facts.replica_of]
            model.primary.others.append(model)
            model.primary.others.sort(key=lambda one: (len(one.name), one.name))
            node.touch(model.primary)
        node.models[facts.name] = model
        model.enabled = facts.enabled if model.primary is model else model.primary.enabled
        models.judge(node, model)
        old = None
    else:
        old, model.facts = model.facts, facts
        model.expert_copies = None  # they were chosen for the files and settings before
        withdraw(node, model)
        models.judge(node, model)
        model.removed = False
        if old.enabled != facts.enabled:
            model.enabled = facts.enabled
            if not model.enabled:
                refusal = admission.disabled(model)
                node.reject_new(model, refusal)
                node.answer_loads(model, refusal)
        if old.fingerprint != facts.fingerprint:
            models.clear_failure(node, model)
            before, after = (one.fingerprint or "cannot be served" for one in (old, facts))
            model.story.tell(node.now, node.cause, f"files changed: {before} -> {after}")
        if not keeping.same_files(old, facts):
            keeping.drop_all(node, model, "its files changed")
    models.raise_work_space(node, model)
    if model.copy is None and model.placement is None:
        split = f", to be split over {facts.num_ranks} devices" if facts.is_split else ""
        models.rest(node, model, ("registered" if old is None else "registered again") + split)
    pin_as_registered(node, model, old)
    node.touch(model)


def pin_as_registered(node: Node, model: Model, old: ModelFacts | None) -> None:
    """Pins or unpins a model if its setting `pin` has changed since it was last registered. If the setting has not changed, the
    operator's last command to pin or unpin it stays in force. old: the model's facts before; None: the model is new."""
    if old is not None and old.pinned == model.facts.pinned:
        return
    if not model.facts.pinned:
        pins.unpin(node, model)
    elif model.state not in residency.CLOSED:
        refusal = pins.pin(node, model)
        if refusal is not None:
            model.reason = f"not pinned: {refusal.message}"
            model.story.tell(node.now, node.cause, model.reason)


def removed(node: Node, event: ModelRemoved) -> None:
    """Handles the event that a model's folder is gone. Its waiting requests are refused for good; running ones are completed,
    unless overdue work of another model ends them (preemption.py). Then the model is evicted and forgotten."""
    model = node.models.get(event.model)
    if model is None:
        return
    if not model.removed:
        model.removed, model.removed_at = True, node.now
    pins.unpin(node, model)
    refusal = admission.removed(model)
    node.reject_queue(model, refusal)
    node.answer_loads(model, refusal)
    node.touch(model)


def withdraw(node: Node, model: Model) -> None:
    """Stops the efforts to place a model, which rely on old facts about it: removes the model from its devices' lists of waiting
    models, and drops its placement if that is not loading yet."""
    unlist(node, model)
    if model.placement is not None and model.copy is None:
        drop(node, model.placement)
