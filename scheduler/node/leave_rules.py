"""Applies the rules by which idle models are evicted: every LeaveRule that this module imports. If several rules would evict a
model, the earliest time counts."""

from __future__ import annotations

from scheduler.node import actions, residency
from scheduler.node.keep_alive import KEEP_ALIVE
from scheduler.node.leave_rule import LeaveRule
from scheduler.node.node import Model, Node
from scheduler.node.placements import evict

RULES = tuple(value for value in vars().values() if isinstance(value, LeaveRule))
EVICT_REASONS = actions.EVICT_REASONS | {rule.name: rule.meaning for rule in RULES}


def next_of(model: Model) -> tuple[float, LeaveRule] | None:
    """Returns when the model is evicted if no request comes, in monotonic seconds, and by which rule; None if it stays."""
    copy = model.copy
    if copy is None or model.state != residency.READY or model.pinned or model.is_used:
        return None
    found = [(at, rule) for rule in RULES if (at := rule.leaves_at(model)) is not None]
    return min(found, key=lambda entry: entry[0], default=None)


def leaves_at(model: Model) -> float | None:
    """Returns when the model is evicted if no request comes, in monotonic seconds; None if it stays."""
    found = next_of(model)
    return None if found is None else found[0]


def apply(node: Node, model: Model) -> None:
    """Evicts an idle model if the time that a rule sets for it has come. Otherwise sets a deadline at that time, or removes the
    deadline if no rule evicts the model."""
    found = next_of(model)
    if found is None:
        node.deadlines.discard(("leave", model.name))
        return
    at, rule = found
    if at > node.now:
        node.deadlines.set(("leave", model.name), at)
    else:
        node.set_state(model, residency.DRAINING, rule.because(model))
        model.leaves_by = rule.name
        evict(node, model)


def story(node: Node, model: Model) -> list[str]:
    """Returns the lines of `hearth why`, from all rules, about how long the model stays on its device; [] if it is on none."""
    return [] if model.copy is None else [line for rule in RULES for line in rule.story(node, model)]
