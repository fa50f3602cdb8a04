"""Bounds the total number of CUDA graphs of all models of a process, because the memory that the driver keeps for graphs does not
count towards torch's limit. This also bounds the memory that graphs keep for their results.

An evicted model keeps its graphs, to use them again when it returns, until another model needs the room. If no evicted model has
graphs, a new graph that a step needs replaces one that no step has run for a while.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

log = logging.getLogger("engine")

# The graphs of four models: each has 19 of decode steps and 12 of steps with prompt chunks. The driver keeps up to 2 MiB for a
# graph, and the default budget leaves enough of a GPU's memory for this number (config/devices.py).
MOST_GRAPHS = 124
RESTING_S = 60.0  # a graph that no step has run for this long may be dropped for one that a step needs


class GraphHolder(Protocol):
    """The graphs of one model's steps of one kind. captured: the graphs by size of step; used_s of a graph is the time.monotonic()
    at which a step last ran it, -inf if none has. evicted_s: the time.monotonic() at which the model was evicted; None: it is not
    evicted."""

    captured: dict[Any, Any]
    evicted_s: float | None

    def drop(self) -> None:
        """Drops all graphs of this holder."""

    def drop_size(self, size: Any) -> None:
        """Drops the graph for steps of this size, if there is one."""


class GraphRoom:
    """The room for the CUDA graphs of all models of a process. most: how many graphs there may be. The thread that captures graphs
    calls the methods; other threads may drop graphs and delete holders meanwhile."""

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        self._most = most
        self._holders: list[weakref.ref[GraphHolder]] = []  # those that have captured a graph
        self._is_logged = False

    @property
    def num_graphs(self) -> int:
        """Returns the total number of graphs of all models."""
        return sum(len(one.captured) for one in self._alive())

    def is_free(self) -> bool:
        """Returns whether there is room to capture a graph that no step needs yet. Graphs of evicted models count as room, because
        `make` may drop them. The first time that there is no room, this is logged."""
        if self.num_graphs < self._most or any(self._evicted()):
            return True
        if not self._is_logged:
            self._is_logged = True
            log.info("%d graphs of steps are captured; a further one takes the place of one that no step runs", self._most)
        return False

    def is_free_for_a_step(self) -> bool:
        """Returns whether there is room to capture a graph that a step needs now. Graphs of evicted models count as room, and so
        does any graph that no step has run within RESTING_S."""
        return self.is_free() or self._resting() is not None

    def make(self, holder: GraphHolder) -> bool:
        """Makes room for one more graph of `holder`, if need be by dropping other graphs: first those of evicted models, beginning
        with the model evicted longest ago; then the graph that was run longest ago, if that is more than RESTING_S ago. Returns
        whether there is room now."""
        if all(ref() is not holder for ref in self._holders):
            self._holders.append(weakref.ref(holder))
        evicted = sorted(self._evicted(), key=lambda one: one.evicted_s or 0.0)
        while self.num_graphs >= self._most:
            if evicted:
                evicted.pop(0).drop()
            elif (resting := self._resting()) is not None:
                resting[0].drop_size(resting[1])
            else:
                return False
        return True

    def drop_evicted(self) -> bool:
        """Drops the graphs of all models that were evicted. Returns whether there were any."""
        evicted = list(self._evicted())
        for one in evicted:
            one.drop()
        return bool(evicted)

    def _alive(self) -> list[GraphHolder]:
        found = [(ref, ref()) for ref in self._holders]
        self._holders = [ref for ref, one in found if one is not None]
        return [one for _, one in found if one is not None]

    def _evicted(self) -> Iterator[GraphHolder]:
        """Yields those holders of graphs whose models are evicted."""
        return (one for one in self._alive() if one.evicted_s is not None and one.captured)

    def _resting(self) -> tuple[GraphHolder, Any] | None:
        """Returns (holder, size) of the graph that was run longest ago. Returns None if steps have run all graphs within
        RESTING_S."""
        rested_s = time.monotonic() - RESTING_S
        used = [
            (graph.used_s, holder, size)
            for holder in self._alive()
            for size, graph in list(holder.captured.items())
            if graph.used_s <= rested_s
        ]
        return min(used, key=lambda one: one[0])[1:] if used else None
