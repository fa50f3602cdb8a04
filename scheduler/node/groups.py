"""Determines which devices may hold a model together. A whole model takes any one of the devices on which it may be. A split model
(ModelFacts.num_ranks > 1) takes several of one kind, each of which holds one share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice

# There are many combinations of several devices, and an event must not look at all of them. The first ones are the best, except
# where a victim is on several of the devices.
MAX_GROUPS = 16


def kind_of(device: str) -> str:
    """Returns the kind of a device: "cpu" of "cpu:0". A carve-out such as "cpu:0/MODEL" is of no kind (""), because it is set
    aside for a model that is not split."""
    return "" if "/" in device else device.partition(":")[0]


def pools(devices: Iterable[str], num_ranks: int) -> list[tuple[str, ...]]:
    """Returns sets of devices, each in the given order, of which any num_ranks may hold a model together: for a whole model all
    devices, else those of each kind if they are enough. [] if there are too few devices."""
    if num_ranks == 1:
        return [alone] if (alone := tuple(devices)) else []
    by_kind: dict[str, list[str]] = {}
    for device in devices:
        by_kind.setdefault(kind_of(device), []).append(device)
    return [tuple(names) for kind, names in by_kind.items() if kind and len(names) >= num_ranks]


def groups(preferred: Sequence[str], num_ranks: int) -> list[tuple[str, ...]]:
    """Returns the groups of num_ranks devices that may hold a split model, each in the order of its ranks, which is the order of
    the devices' names. preferred: the devices that could hold a share, the best first. The groups of the best devices come first:
    of three devices these are (1, 2), (1, 3) and (2, 3). Of each kind of device at most MAX_GROUPS groups are returned. For a whole
    model (num_ranks 1) each device is a group."""
    if num_ranks == 1:
        return [(device,) for device in preferred]
    return [group for pool in pools(preferred, num_ranks) for group in _of_pool(pool, num_ranks)]


def _of_pool(pool: tuple[str, ...], num_ranks: int) -> Iterator[tuple[str, ...]]:
    return (tuple(sorted(names)) for names in islice(combinations(pool, num_ranks), MAX_GROUPS))


def joined(devices: Iterable[str]) -> str:
    """Returns the name of a group of devices, such as "cpu:0+cpu:1"; for a single device its own name."""
    return "+".join(devices)
