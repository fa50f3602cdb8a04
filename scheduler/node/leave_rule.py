"""Describes a rule by which an idle model is evicted from its device although no other model needs the room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.node.node import Model, Node


def _no_story(node: Node, model: Model) -> list[str]:
    return []


@dataclass(slots=True, frozen=True)
class LeaveRule:
    """One rule by which idle models are evicted. It applies only to ready models that are not pinned and have no requests.

    name: the Evict.reason of models that are evicted by the rule. meaning: what this reason means, for operators. leaves_at:
    returns the monotonic seconds at which the model is evicted if no event concerns it until then; None if the rule does not evict
    it. It is called after each event of the model. because: returns the reason that the log and `hearth why` give. by: the end of
    the line "it leaves in 5 s", such as "by its keep_alive". story: returns further lines of `hearth why` about a model that is on
    a device."""

    name: str
    meaning: str
    leaves_at: Callable[[Model], float | None]
    because: Callable[[Model], str]
    by: str
    story: Callable[[Node, Model], list[str]] = _no_story
