"""Describes a rule by which an idle model is evicted from its device although nobody needs its room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.node.node import Model, Node


def _no_story(node: Node, model: Model) -> list[str]:
    return []


@dataclass(slots=True, frozen=True)
class LeaveRule:
    """One rule. It is asked about ready models that are not pinned and have no requests; all others stay.

    name: the Evict.reason of models that are evicted by the rule. meaning: what this reason means, for operators. leaves_at:
    returns the monotonic seconds at which the model is evicted if nothing happens to it; None if the rule lets it stay. It is
    called after each event of the model. because: returns the reason that the log and `hearth why` give. by: the end of the line
    "it leaves in 5 s", such as "by its keep_alive". story: returns further lines of `hearth why` about a model that is on a
    device."""

    name: str
    meaning: str
    leaves_at: Callable[[Model], float | None]
    because: Callable[[Model], str]
    by: str
    story: Callable[[Node, Model], list[str]] = _no_story
