"""Pauses busy models that are evicted for overdue work of another model, after they had time to drain.

Only overdue work forces busy models out (rule 9 of docs/design/models.md). They are paused preempt_after_s after they have begun to
drain, or later: not before the work has been overdue for preempt_after_swaps times the seconds that pausing them costs. Requests
that end within that time should end rather than be paused. The second limit does not apply if other replicas of the victims have
room for all of their requests.

Then the victims are evicted between two steps. Their requests wait at the front of their queue, count as newly arrived, and
continue from saved or recomputed KV when the model is back, or on another replica.

The requests of a disabled model are paused and continue like any other's. A model whose folder is gone cannot be loaded again: its
requests may run until drain_timeout_s after the folder went, and are then ended with this reason.
"""

from __future__ import annotations

from scheduler.node import requests
from scheduler.node.actions import Refusal
from scheduler.node.node import Model, Node, Placement


def foresee(node: Node, placement: Placement) -> None:
    """Sets the deadline at which the busy victims of a placement, which have begun to drain, are paused (see the module for its
    time)."""
    settings = node.settings
    pause_at = node.now + settings.preempt_after_s
    busy = [victim for name in placement.victims if (victim := node.models[name]).running]
    if not all(_has_room_elsewhere(node, victim) for victim in busy):
        cost_s = sum(pause_cost_s(node, victim) for victim in busy)
        model = node.models[placement.model]
        overdue_at = node.overdue_at(model, node.slowest_reload_s(model, placement.devices))
        pause_at = max(pause_at, overdue_at + settings.preempt_after_swaps * cost_s)
    node.deadlines.set(("preempt", placement.model), pause_at)


def _has_room_elsewhere(node: Node, victim: Model) -> bool:
    """Returns whether the other replicas of the victim's model can take all requests that run on the victim."""
    others = (one for one in victim.replicas if one is not victim and one.takes_requests)
    return sum(max(0, node.window(one) - len(one.running)) for one in others) >= len(victim.running)


def pause_cost_s(node: Node, model: Model) -> float:
    """Returns how many seconds it costs to pause a model: its weights must be loaded again, and its running KV copied out and in or
    computed again, whichever is faster."""
    copy = model.copy
    assert copy is not None
    device = node.devices[copy.leader]
    per_token = copy.facts.kv_bytes_per_token
    num_tokens = model.kv_running_bytes / per_token if per_token else 0.0
    rate = device.costs.prefill_tokens_per_s.get(model.facts.costs_name)
    copy_s = 2 * model.kv_running_bytes / device.costs.copy_bytes_per_s
    can_save = node.host.num_slots > 0 and copy.facts.saves_kv
    compute_s = num_tokens / rate if rate else copy_s
    return node.slowest_reload_s(model, copy.devices) + (min(copy_s, compute_s) if can_save else compute_s)


def pause_victims(node: Node, placement: Placement) -> None:
    """Pauses those victims of a placement that still have running requests, because their time to drain is over. If the folder of a
    victim is gone, so that its requests cannot continue later, they are ended instead, but not before drain_timeout_s after the
    folder went. Until then nothing is paused, and a deadline is set at which to try again."""
    busy = [victim for name in placement.victims if (victim := node.models[name]).running]
    ends_at = (one.primary.removed_at + node.settings.drain_timeout_s for one in busy if _cannot_come_back(one))
    until = max(ends_at, default=node.now)
    if until > node.now:
        node.deadlines.set(("preempt", placement.model), until)
        return
    for victim in busy:
        num, ends = len(victim.running), _cannot_come_back(victim)
        requests.pause(node, victim)
        if ends:
            message = f"the folder of {victim.name} is gone, and {placement.model} needs its room"
            victim.story.tell(node.now, node.cause, f"{num} requests ended: {message}")
            node.reject_queue(victim.primary, Refusal("model_removed", message))
        else:
            victim.paused = True
            victim.story.tell(node.now, node.cause, f"paused for {placement.model}: {num} requests wait for it")


def _cannot_come_back(model: Model) -> bool:
    """Returns whether the requests of a replica can never continue if they are paused, because the folder of its model is gone."""
    return model.primary.removed
