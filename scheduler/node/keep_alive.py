"""Implements rule 11 of docs/design/models.md: a model that has had no request for as long as its keep_alive says is evicted from
its device.

The time counts from the end of the model's last request, or from the end of its load if that was later. A copy that an operator
asked for (`hearth load`) stays until it has been requested; otherwise it could be evicted before its first request.
"""

from __future__ import annotations

from math import inf

from scheduler.node import residency
from scheduler.node.events import KeepAliveSet
from scheduler.node.leave_rule import LeaveRule
from scheduler.node.node import Model, Node


def set_by_client(node: Node, event: KeepAliveSet) -> None:
    """Sets how long a model stays on its device after its last request, as a client's KeepAliveSet asks. Has no effect on a model
    that is on no device and that nobody waits for."""
    model = node.models.get(event.model)
    if model is not None:
        model.asked_keep_alive_s = event.keep_alive_s
        for one in model.replicas:
            if one.copy is not None:
                one.copy.requested = True
        node.touch(model)


def leaves_at(model: Model) -> float | None:
    """Returns when an idle model is evicted by its keep_alive if no request comes, in monotonic seconds. Returns None if it may
    stay for ever, or if it was loaded for an operator's command and has not been requested since."""
    copy = model.copy
    if copy is None or model.keep_alive_s == inf:
        return None
    replicas = model.replicas  # no replica leaves while another is used, because it would come back with the next request
    if not any(one.copy is not None and one.copy.requested for one in replicas):
        return None
    return max(copy.ready_at or 0.0, *(one.last_used or 0.0 for one in replicas)) + model.keep_alive_s


def because(model: Model) -> str:
    return f"no request for {model.keep_alive_s:g} s, as long as its keep_alive says"


def story(node: Node, model: Model) -> list[str]:
    """Returns the line of `hearth why` that says when the model will be evicted by its keep_alive, in a list; [] if it is on no
    device or may stay until its memory is needed."""
    copy = model.copy
    if copy is None or model.keep_alive_s == inf:
        return []
    keep = f"keep_alive {model.keep_alive_s:g} s" + (" (set by a request)" if model.primary.asked_keep_alive_s is not None else "")
    if model.pinned:
        return [f"{keep} does not count while it is pinned"]
    at = leaves_at(model)
    if at is not None and model.state == residency.READY and not model.is_used:
        return [f"leaves in {max(0.0, at - node.now):.1f} s unless a request comes: {keep}"]
    if not copy.requested:
        return [f"{keep} counts from its first request on: it was loaded without one"]
    return [f"{keep} counts from the end of its last request"]


KEEP_ALIVE = LeaveRule(
    name="idle",
    meaning="it had no request for as long as its keep_alive says",
    leaves_at=leaves_at,
    because=because,
    by="by its keep_alive",
    story=story,
)
