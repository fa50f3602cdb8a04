"""Chooses the devices that a model is loaded onto, from those that could take it now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.node.eviction import Resident
from scheduler.node.groups import by_rank, num_other_hosts


@dataclass(slots=True)
class Option:
    """A way to place a model: the device, or group of devices, onto which it could be loaded, and the models that would have to be
    evicted for it."""

    devices: tuple[str, ...]  # by rank
    victims: list[Resident]
    lease_chunks: int  # the lease before the load, on the device with the smallest lease
    left: bool = False  # its weights, or those of a share, are still there, left by an engine or a group that died

    @property
    def forced(self) -> bool:
        return any(victim.busy for victim in self.victims)

    @property
    def cost(self) -> float:
        """The expected cost of the evictions, to compare options by: the sum over the victims of priority x request rate x reload
        seconds, up to a constant factor."""
        return sum(victim.value * victim.chunks for victim in self.victims)


def rank(option: Option) -> tuple[bool, bool, float, bool, int, int, tuple[tuple[object, ...], ...]]:
    """Returns the sort key of an option; the option with the least key is best. Its entries are, in this order: whether running
    requests are disturbed, whether models are evicted, the cost of the evictions, whether weights must be read, the number of other
    hosts, the amount of free room (negated: more room is better, so that models spread), and the names of the devices."""
    hosts, room = num_other_hosts(option.devices), option.lease_chunks
    names = tuple(map(by_rank, option.devices))
    return option.forced, bool(option.victims), option.cost, not option.left, hosts, -room, names


def choose(options: Iterable[Option]) -> Option | None:
    """Returns the best option, the one for which the function `rank` returns the least key; None if there are no options."""
    return min(options, key=rank, default=None)
