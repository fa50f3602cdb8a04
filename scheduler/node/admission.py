"""Decides whether a request is accepted. Refusals are values, each with a reason and, where trying again helps, a time."""

from __future__ import annotations

from math import ceil

from scheduler.node import pins, residency
from scheduler.node.actions import Refusal
from scheduler.node.events import RequestFacts
from scheduler.node.node import Model, Node


def refuse(node: Node, model: Model | None, facts: RequestFacts) -> Refusal | None:
    """Returns why a new request is refused; None if it is accepted. model: the model that the request names; None if no model has
    this name. O(devices)."""
    name = facts.model
    if model is None:
        return Refusal("model_not_found", f"no model {name!r} on this node")
    if (shut := gate(node)) is not None:
        return shut
    if model.removed:
        return removed(model)
    refusal = closed(node, model)
    if refusal is not None and not (model.state == residency.FAILED and model.served_elsewhere):
        return refusal
    if model.closed:
        return Refusal("model_draining", f"{name} is being drained by the operator", node.settings.drain_retry_after_s)
    # all sequences of a client's request are accepted with the first one, or a request larger than the queue never could be
    if not facts.part_of and not facts.was_accepted:
        refusal = queue_full(node, model, facts.tenant)
        if refusal is not None:
            return refusal
    if model.copy is None and not pins.has_place(node, model) and not model.served_elsewhere:
        return pins.would_not_fit(node, model)
    return None


def gate(node: Node) -> Refusal | None:
    """Returns why the node takes no new requests, whatever model they name; None if it takes them."""
    if node.stopping:
        return Refusal("server_restarting", "the server is restarting; send the request again", node.settings.drain_retry_after_s)
    if node.draining:
        return Refusal("node_draining", "this node takes no new requests", node.settings.drain_retry_after_s)
    return None


def queue_full(node: Node, model: Model, tenant: str) -> Refusal | None:
    """Returns a refusal if the model's queue, or the tenant's part of it, is full for a new request; else None."""
    most = max_queued(node, model)
    if num_waiting(node, model) >= most:
        message = f"{len(model.queue)} requests wait for {model.name}; max_queued is {most}"
        return Refusal("queue_full", message, retry_after_s(node, model))
    own = model.queue_of.get(tenant)
    if tenant and own is not None and own.num_new >= max_queued_per_tenant(node, model):
        message = f"{len(own.requests)} requests of {tenant} wait for {model.name}; {max_queued_per_tenant(node, model)} may"
        return Refusal("queue_full", message, retry_after_s(node, model))
    return None


def closed(node: Node, model: Model) -> Refusal | None:
    """Returns why new requests for the model are refused in its current state: it is disabled by the operator, or cannot be served,
    for example because it failed. None if they are not refused for this reason."""
    if not model.enabled:
        return disabled(model)
    return unservable(node, model)


def closed_to_all(node: Node, model: Model) -> Refusal | None:
    """Returns why the model refuses even requests that ran before and wait for it to come back; None if these may wait. They may
    wait while the model is disabled, because requests that have begun are still completed. They are refused if its folder is gone,
    or if it cannot be served."""
    if model.removed:
        return removed(model)
    if model.comes_back:
        return None if model.state == residency.DISABLED else unservable(node, model)
    return closed(node, model)


def unservable(node: Node, model: Model) -> Refusal | None:
    """Returns why the model cannot be served, as a refusal: it is incomplete, unusable, too large or has failed. None if it can be
    served. Whether the operator has disabled the model does not count."""
    if model.state not in residency.CLOSED:
        return None
    if model.state == residency.INCOMPLETE:
        return Refusal("model_incomplete", f"{model.name} is incomplete: {model.facts.incomplete}")
    if model.facts.unusable:
        return Refusal("model_unusable", f"{model.name} cannot be served: {model.facts.unusable}", details={"model": model.name})
    if model.state == residency.REFUSED:
        return Refusal("model_too_large", f"{model.name} can never fit: {model.too_large}", details={"model": model.name})
    until = model.quarantined_until
    return Refusal("model_failed", f"{model.name} failed: {model.failure}", None if until is None else seconds(until - node.now))


def removed(model: Model) -> Refusal:
    return Refusal("model_removed", f"the folder of {model.name} is gone")


def disabled(model: Model) -> Refusal:
    return Refusal("model_disabled", f"{model.name} is disabled by the operator")


def wait_exceeded(node: Node, model: Model) -> Refusal:
    message = f"waited {node.settings.max_wait_s:g} s for {model.name} (max_wait_s); it is {model.state}: {model.reason}"
    return Refusal("wait_exceeded", message, retry_after_s(node, model))


def num_waiting(node: Node, model: Model) -> int:
    """Returns how many sequences in the model's queue count against max_queued. Sequences that ran before never count. If all
    others together reach max_queued, each named tenant counts with at most max_queued_per_tenant of them, so that one tenant alone
    cannot fill the queue."""
    num = len(model.queue) - model.num_resubmissions
    if num < max_queued(node, model):
        return num
    most = max_queued_per_tenant(node, model)
    return sum(min(line.num_new, most) if tenant else line.num_new for tenant, line in model.queue_of.items())


def max_queued(node: Node, model: Model) -> int:
    return model.facts.max_queued or node.settings.max_queued_per_model


def max_queued_per_tenant(node: Node, model: Model) -> int:
    """Returns how many sequences of one tenant may wait: by default half of max_queued, so that no tenant alone can fill the
    queue."""
    most = max_queued(node, model)
    return min(most, node.settings.max_queued_per_tenant or ceil(most / 2))


def retry_after_s(node: Node, model: Model) -> float:
    """Returns after how many seconds a client should try again, in whole seconds, rounded up, and at most max_wait_s. It is the
    time in which half of the queue is expected to be served or, for a model that is not loaded, twice the time of its load."""
    wait = 1.0
    rate = model.served.recent_per_s(node.now)
    if rate > 0 and model.copy is not None:
        wait = len(model.queue) / rate / 2
    elif model.devices:
        wait = node.reload_s(model, node.devices[model.devices[0]]) * 2
    return seconds(min(wait, node.settings.max_wait_s))


def seconds(wait_s: float) -> float:
    """Returns a waiting time rounded up to whole seconds, at least 1, as the Retry-After header requires."""
    return float(max(1, ceil(wait_s)))
