"""Determines which devices may hold a model together. A whole model takes any one of the devices on which it may be. A split model
(ModelFacts.num_ranks > 1) takes several of one kind, a group, each of which holds one share.

A device may be lent by another host (`cpu:0@b`). The devices of one pipeline stage exchange too many bytes for a network, so all
devices of a stage must be on one host. The last stage must be on this machine, because its first device is rank 0 of the model:
requests are submitted to the engine of that device. (A model that is not divided into stages counts as one stage, whether it is
split or not.) A group therefore has on each host the devices of one or more whole stages or none, and on this machine those of at
least one stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice

# There are many combinations of several devices, and an event must not look at all of them. The first ones are the best, except
# where a victim is on several of the devices.
MAX_GROUPS = 16
HERE = ""  # the host of this machine's own devices


def kind_of(device: str) -> str:
    """Returns the kind of a device: "cpu" of "cpu:0". A carve-out such as "cpu:0/MODEL" is of no kind (""), because it is set
    aside for a model that is not split."""
    return "" if "/" in device else device.partition(":")[0]


def host_of(device: str) -> str:
    """Returns the host that lends a device: "b" of "cpu:0@b"; HERE for a device of this machine, and for a carve-out."""
    return device.partition("/")[0].partition("@")[2]


def by_rank(device: str) -> tuple[str, str, int, str, str]:
    """Returns the key by which devices are sorted wherever their order counts or is shown. Devices of this machine come before
    those of other hosts; devices of one host and kind are sorted by index, "cuda:2" before "cuda:10". A carve-out comes after its
    device."""
    lent, _, carved_for = device.partition("/")
    name, _, host = lent.partition("@")
    kind, _, number = name.partition(":")
    return host, kind, len(number), number, carved_for


def num_other_hosts(devices: Iterable[str]) -> int:
    """Returns the number of other hosts that lend at least one of the devices."""
    return len({host_of(device) for device in devices} - {HERE})


def pools(devices: Iterable[str], num_ranks: int, num_stages: int = 1) -> list[tuple[str, ...]]:
    """Returns sets of devices, each in the given order; the devices of a model are all taken from one set. For a whole model there
    is one set: all devices of this machine. For a split model there is one set for each kind of device ("cpu", "cuda") with enough
    devices; it has only devices that can be part of a group, that is, hold the model together with others. [] if there are too few
    devices. num_ranks: number of devices that the model takes. num_stages: the model's pipeline stages."""
    if num_ranks == 1:
        return [alone] if (alone := tuple(device for device in devices if host_of(device) == HERE)) else []
    by_kind: dict[str, list[str]] = {}
    for device in devices:
        by_kind.setdefault(kind_of(device), []).append(device)
    stage_size = num_ranks // num_stages
    found = (_usable(names, stage_size, num_stages) for kind, names in by_kind.items() if kind)
    return [pool for pool in found if pool]


def most_groups(pool: Iterable[str], num_ranks: int, num_stages: int = 1) -> int:
    """Returns how many copies of a split model the devices `pool` can hold at most, if no two copies share a device. num_ranks:
    number of devices that a copy takes. num_stages: number of its pipeline stages, at least one of which must be on this
    machine."""
    stage_size = num_ranks // num_stages
    stages = {host: number // stage_size for host, number in Counter(map(host_of, pool)).items()}
    return min(stages.get(HERE, 0), sum(stages.values()) // num_stages)


def _usable(devices: Sequence[str], stage_size: int, num_stages: int) -> tuple[str, ...]:
    """Returns those of the devices that can hold a share of a split model together with others of them; () if they are too few for
    a model. devices: all of one kind. stage_size: number of devices of each pipeline stage. num_stages: number of stages."""
    numbers = Counter(map(host_of, devices))
    if numbers[HERE] < stage_size or sum(number // stage_size for number in numbers.values()) < num_stages:
        return ()
    hosts = {HERE, *(host for host, number in numbers.items() if number >= stage_size and num_stages > 1)}
    return tuple(devices) if len(hosts) == len(numbers) else tuple(device for device in devices if host_of(device) in hosts)


def groups(preferred: Sequence[str], num_ranks: int, num_stages: int = 1) -> list[tuple[str, ...]]:
    """Returns the groups of num_ranks devices that may hold a split model together; [] if there are too few devices. A group has
    whole pipeline stages on each host, at least one of them on this machine. Its devices are sorted by rank: first those of this
    machine, then those of other hosts by the host's name; those of one host by index (`by_rank`).

    preferred: the devices that could hold a share, the best first. num_stages: the model's pipeline stages. The groups of the best
    devices come first: for groups of two of the devices 1, 2 and 3 the order is (1, 2), (1, 3), (2, 3). At most MAX_GROUPS groups
    are returned for each kind of device. For a whole model (num_ranks 1) each device of this machine is a group."""
    found = pools(preferred, num_ranks, num_stages)
    if num_ranks == 1:
        return [(device,) for pool in found for device in pool]
    return [group for pool in found for group in _of_pool(pool, num_ranks, num_ranks // num_stages)]


def _of_pool(pool: tuple[str, ...], num_ranks: int, stage_size: int) -> Iterator[tuple[str, ...]]:
    is_local = not num_other_hosts(pool)
    chosen = combinations(pool, num_ranks) if is_local else _Stages(pool, stage_size).combinations(num_ranks)
    return (tuple(sorted(names, key=by_rank)) for names in islice(chosen, MAX_GROUPS))


def is_group(devices: Sequence[str], num_ranks: int, num_stages: int = 1) -> bool:
    """Returns whether these devices, given in the order of their ranks, may hold a model together: all of one kind, and on each
    host whole pipeline stages, at least one of them on this machine."""
    stage_size, kinds, numbers = num_ranks // num_stages, set(map(kind_of, devices)), Counter(map(host_of, devices))
    if len(devices) != num_ranks or list(devices) != sorted(set(devices), key=by_rank):
        return False
    if numbers[HERE] < stage_size or any(number % stage_size for number in numbers.values()):
        return False
    return num_ranks == 1 or (len(kinds) == 1 and "" not in kinds)


class _Stages:
    """Lists the groups of devices of several hosts that may hold a split model together. The condition is that a group has whole
    pipeline stages on each host, at least one of them on this machine. pool: the devices. stage_size: number of devices of each
    pipeline stage.

    The groups come in the order of itertools.combinations. A combination is abandoned as soon as no group can begin with it,
    because there may be very many combinations before the first group."""

    def __init__(self, pool: Sequence[str], stage_size: int) -> None:
        self._pool, self._stage_size = pool, stage_size
        self._hosts = list(map(host_of, pool))
        self._left: list[Counter[str]] = [Counter()]  # for each place in the pool, the devices of each host from there on
        for host in reversed(self._hosts):
            self._left.append(self._left[-1] + Counter((host,)))
        self._left.reverse()

    def combinations(self, number: int, begin: int = 0, taken: tuple[int, ...] = ()) -> Iterator[tuple[str, ...]]:
        """Yields all groups of devices that may hold a split model, and that consist of the devices at the indices `taken` in the
        pool and of `number` further devices, at indices from `begin` on."""
        if not number:
            yield tuple(self._pool[at] for at in taken)
            return
        have = Counter(self._hosts[at] for at in taken)
        for at in range(begin, len(self._pool) - number + 1):
            have[self._hosts[at]] += 1
            if self._can_end(have, self._left[at + 1], number - 1):
                yield from self.combinations(number - 1, at + 1, (*taken, at))
            have[self._hosts[at]] -= 1

    def _can_end(self, have: Counter[str], left: Counter[str], number: int) -> bool:
        """Returns whether a combination of devices that has been begun can become a group for a split model, with exactly `number`
        further devices. have: the devices that the combination already has, counted by host. left: the devices that may be added,
        counted by host."""
        size, needed, more = self._stage_size, 0, 0
        for host in {HERE, *have, *left}:
            due = -have[host] % size if host or have[host] else size
            if due > left[host]:
                return False
            needed += due
            more += (left[host] - due) // size * size
        return needed <= number <= needed + more


def joined(devices: Iterable[str]) -> str:
    """Returns the name of the group of devices that hold a split model, such as "cpu:0+cpu:1"; for a single device its own name."""
    return "+".join(devices)
