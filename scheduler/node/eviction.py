"""Chooses the models to evict from a device to make room. Its functions depend on their arguments alone.

A model's value is priority x request rate x reload seconds / bytes freed: the seconds of reloading that its absence is expected to
cost per second, weighted by priority, per byte that its eviction frees. Models of low value are evicted first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Target:
    """A model that has to fit on a device. chunks, work_space_chunks: what the model needs on the device. room_chunks: the chunks
    of the device minus those that are reserved for other placements."""

    chunks: int
    work_space_chunks: int
    room_chunks: int


@dataclass(slots=True)
class Resident:
    """A model's copy on the device for which victims are chosen. value: the expected cost of its absence per byte that its eviction
    frees (see the module). last_used: monotonic seconds. busy: whether it has requests, so that its eviction would be forced.
    evictable: whether it may be chosen; False for example if it is pinned, loading, or being evicted already."""

    name: str
    chunks: int
    work_space_chunks: int
    value: float
    last_used: float
    evictable: bool
    busy: bool


def value(priority: float, requests_per_s: float, reload_s: float, freed_bytes: int) -> float:
    return priority * requests_per_s * reload_s / max(1, freed_bytes)


class _Place:
    """The state of one device while victims are chosen: the model that has to fit on it, and which of the resident models still
    stay."""

    __slots__ = ("_held", "_resident", "_staying", "_target")

    def __init__(self, target: Target, resident: Iterable[Resident]) -> None:
        self._target = target
        self._resident = {model.name: model for model in resident}
        self._staying = dict(self._resident)
        self._held = sum(model.chunks for model in self._staying.values())

    @property
    def fits(self) -> bool:
        target = self._target
        work_space = max((model.work_space_chunks for model in self._staying.values()), default=0)
        return self._held + target.chunks + max(work_space, target.work_space_chunks) <= target.room_chunks

    @property
    def evictable(self) -> list[Resident]:
        return [model for model in self._resident.values() if model.evictable]

    def holds(self, name: str) -> bool:
        return name in self._staying

    def remove(self, name: str) -> None:
        if name in self._staying:
            self._held -= self._staying.pop(name).chunks

    def put_back(self, name: str) -> None:
        if name in self._resident:
            model = self._staying[name] = self._resident[name]
            self._held += model.chunks


def victims(target: Target, resident: Iterable[Resident]) -> list[Resident] | None:
    """Returns the models to evict so that the target fits on the device: [] if it fits already, None if it cannot fit. Models are
    chosen one after the other until the target fits: idle ones before busy ones, then by the value in their field `value` (what
    their absence is expected to cost), the lowest first, and of equal value the longest unused first. Chosen models that turn out
    not to be needed are left out."""
    return victims_on_all([(target, resident)])


def victims_on_all(members: Sequence[tuple[Target, Iterable[Resident]]]) -> list[Resident] | None:
    """Returns the models to evict so that a model fits on each of several devices: [] if it fits already, None if it cannot fit.
    Models are chosen one after the other until it fits: idle ones before busy ones, then by the value in their field `value` (what
    their absence is expected to cost), the lowest first. Chosen models that turn out not to be needed are left out. A chosen model
    is evicted from all of these devices. members: for each device the target and the copies there."""
    places = [_Place(target, resident) for target, resident in members]
    evictable = {model.name: model for place in places for model in place.evictable}
    order = sorted(evictable.values(), key=lambda model: (model.busy, model.value, model.last_used, model.name))
    chosen: list[Resident] = []
    short = [place for place in places if not place.fits]
    for victim in order:
        if not short:
            break
        if any(place.holds(victim.name) for place in short):
            chosen.append(victim)
            for place in places:
                place.remove(victim.name)
            short = [place for place in short if not place.fits]
    if short:
        return None
    # A later, larger victim may have made earlier ones superfluous: the most valuable are spared first.
    for victim in reversed(chosen[:-1]):
        for place in places:
            place.put_back(victim.name)
        if all(place.fits for place in places):
            chosen.remove(victim)
        else:
            for place in places:
                place.remove(victim.name)
    return chosen
