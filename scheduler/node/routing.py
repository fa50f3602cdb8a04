"""Chooses the replica that a request goes to, by how much of its prompt is cached there and how many requests run there."""

from __future__ import annotations

from scheduler.node import residency
from scheduler.node.events import RequestFacts
from scheduler.node.node import Model, Node

# A request goes where its prefix is cached if that is at least this share of its prompt, and if the replica runs at most this many
# times the requests of the least busy one plus this many. So a conversation stays where its cache is, but a prefix that all prompts
# share does not bring all of them to one device.
CACHED_SHARE, BUSIER_TIMES, BUSIER_BY = 0.5, 1.5, 4


def has_room(node: Node, model: Model) -> bool:
    """Returns whether one of the model's replicas can be given a further request now."""
    return any(_has_room(node, one) for one in model.replicas) if model.others else _has_room(node, model)


def choose(node: Node, model: Model, facts: RequestFacts) -> Model | None:
    """Returns the replica to which a request is submitted now; None if all are full or none is loaded. A replica with a large part
    of the prompt in its cache is preferred unless it is much busier than others; otherwise the least busy one is chosen. A replica
    that is still loading is chosen only if no other has room. O(replicas)."""
    if not model.others:
        return model if _has_room(node, model) else None
    with_room = [one for one in model.replicas if _has_room(node, one)]
    found = [one for one in with_room if one.state == residency.READY] or with_room
    if not found:
        return None
    least = min(found, key=_busy)
    most = max((num_tokens for _, num_tokens in facts.cached), default=0)
    if most and most >= CACHED_SHARE * facts.num_prompt_tokens:
        having = {name for name, num_tokens in facts.cached if num_tokens == most}
        best = min((one for one in found if one.name in having), key=_busy, default=least)
        if _busy(best) <= BUSIER_TIMES * _busy(least) + BUSIER_BY:
            return best
    return least


def _has_room(node: Node, replica: Model) -> bool:
    return replica.takes_requests and len(replica.running) < node.window(replica)


def _busy(model: Model) -> int:
    return len(model.running)
