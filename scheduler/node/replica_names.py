"""Names further replicas of a model: `NAME#2`, `NAME#3` and so on. Scheduler and engines know each as a model of its own."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from scheduler.node.events import ModelFacts

MARK = "#"
# With replicas = "auto": requests on each replica before another one is loaded. With fewer, a step costs little more than with one.
REPLICA_AT = 8


def further(facts: ModelFacts, number: int, by_load: bool) -> tuple[ModelFacts, ...]:
    """Returns the facts of the model's further replicas, NAME#2 and so on. number: how many replicas the model has in all, itself
    included. by_load: True if a further replica is loaded only when REPLICA_AT requests run on each loaded one, False if it is
    loaded as soon as the model has a request."""
    at = REPLICA_AT if by_load else 0
    names = (f"{facts.name}{MARK}{position}" for position in range(2, number + 1))
    return tuple(replace(facts, name=name, replica_of=facts.name, replica_at=at, pinned=False) for name in names)


def model_of(name: str, models: Container[str]) -> str:
    """Returns NAME for a further replica's name `NAME#2`, and any other name unchanged. models: the names of all models, because a
    model's own name may contain a `#`."""
    model, mark, _ = name.rpartition(MARK)
    return model if mark and name not in models else name
