"""Chooses the device that a model is loaded onto, from those that could take it now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.node.eviction import Resident


@dataclass(slots=True)
class Option:
    """One device, and which models would have to leave it."""

    device: str
    victims: list[Resident]
    lease_chunks: int  # before it

    @property
    def forced(self) -> bool:
        return any(victim.busy for victim in self.victims)

    @property
    def cost(self) -> float:
        """Expected reload seconds per second caused by the evictions."""
        return sum(victim.value * victim.chunks for victim in self.victims)


def choose(options: Iterable[Option]) -> Option | None:
    """Returns the best option: first without disturbing a running request, then without evictions, then with the least loss, then
    with the most room (so that models spread)."""
    return min(
        options,
        key=lambda option: (option.forced, bool(option.victims), option.cost, -option.lease_chunks, option.device),
        default=None,
    )
