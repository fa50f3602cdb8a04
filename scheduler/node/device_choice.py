"""Chooses the devices that a model is loaded onto, from those that could take it now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.node.eviction import Resident


@dataclass(slots=True)
class Option:
    """One device, or a group of them, and which models would have to leave for the model."""

    devices: tuple[str, ...]  # by rank
    victims: list[Resident]
    lease_chunks: int  # before it, on the device with least
    left: bool = False  # its weights are there still, since an engine died

    @property
    def forced(self) -> bool:
        return any(victim.busy for victim in self.victims)

    @property
    def cost(self) -> float:
        """Expected reload seconds per second caused by the evictions."""
        return sum(victim.value * victim.chunks for victim in self.victims)


def rank(option: Option) -> tuple[bool, bool, float, bool, int, tuple[str, ...]]:
    """Returns what options are compared by. The best has the least: first it disturbs no running request, then it evicts nothing,
    then it loses least, then it reads nothing, then it has the most room (so that models spread)."""
    return option.forced, bool(option.victims), option.cost, not option.left, -option.lease_chunks, option.devices


def choose(options: Iterable[Option]) -> Option | None:
    """Returns the best option; None if there is none."""
    return min(options, key=rank, default=None)
