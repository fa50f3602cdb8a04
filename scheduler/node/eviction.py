"""Chooses the models that leave a device to make room: a pure function of numbers.

Victims ascend by value = priority x request rate x reload seconds / bytes freed: the cost of missing them per byte gained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Target:
    """What has to fit. `room_chunks`: the device's total minus what is promised to others."""

    chunks: int
    work_space_chunks: int
    room_chunks: int


@dataclass(slots=True)
class Resident:
    """A copy on the device. `busy`: evicting it would be forced. `evictable` is False if it is pinned, loading, leaving already
    or not yet allowed to leave again."""

    name: str
    chunks: int
    work_space_chunks: int
    value: float
    last_used: float
    evictable: bool
    busy: bool


def value(priority: float, requests_per_s: float, reload_s: float, freed_bytes: int) -> float:
    return priority * requests_per_s * reload_s / max(1, freed_bytes)


def victims(target: Target, resident: Iterable[Resident]) -> list[Resident] | None:
    """Returns as few victims as needed: idle before busy ones, least value first (ties: longest unused). [] if the target fits
    already, None if it cannot fit."""
    staying = {model.name: model for model in resident}
    held = sum(model.chunks for model in staying.values())

    def fits() -> bool:
        work_space = max((model.work_space_chunks for model in staying.values()), default=0)
        return held + target.chunks + max(work_space, target.work_space_chunks) <= target.room_chunks

    chosen: list[Resident] = []
    order = iter(
        sorted(
            (model for model in staying.values() if model.evictable),
            key=lambda model: (model.busy, model.value, model.last_used, model.name),
        )
    )
    while not fits():
        victim = next(order, None)
        if victim is None:
            return None
        chosen.append(victim)
        held -= staying.pop(victim.name).chunks
    # A later, larger victim may have made earlier ones superfluous: spare the dearest first.
    for victim in reversed(chosen[:-1].copy() if chosen else []):
        staying[victim.name] = victim
        held += victim.chunks
        if fits():
            chosen.remove(victim)
        else:
            held -= staying.pop(victim.name).chunks
    return chosen
