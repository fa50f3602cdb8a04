"""Which models leave a device to make room: a pure, silent function of numbers.

Victims ascend by value = priority x request rate x reload seconds / bytes freed: what it costs to miss them, per byte gained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Target:
    """What has to fit. `room_chunks` is the device's total less what is promised to others."""

    chunks: int
    work_space_chunks: int
    room_chunks: int


@dataclass(slots=True)
class Resident:
    """A copy on the device. `busy`: evicting it would be forced. `evictable` False: pinned, loading, leaving already, or not yet
    again."""

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
    """As few as are needed, idle ones before busy ones, least value first (equal: longest unused). [] when the target fits as it
    is, None when it can't be made to fit."""
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
