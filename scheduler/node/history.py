"""Records the latest placements and why they were made in this way, for `hearth history`. A bounded number is kept; the oldest are
dropped first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from scheduler.node.device_choice import Option
from scheduler.node.eviction import Resident
from scheduler.node.groups import joined
from scheduler.node.views import PlacementView, VictimView

_PLACEMENTS = 256


class _Placement(Protocol):
    """The attributes of a placement (scheduler.node.node.Placement) that the history reads."""

    id: int
    model: str
    devices: tuple[str, ...]
    cause: str


class History:
    __slots__ = ("_records",)

    def __init__(self) -> None:
        self._records: OrderedDict[int, PlacementView] = OrderedDict()

    def begun(self, now: float, placement: _Placement, option: Option, num_bytes: int, waited_s: float) -> None:
        """Records a placement that begins. option: the devices that were chosen and the models that are evicted. num_bytes: bytes
        of the weights on each of the devices. waited_s: seconds since its oldest request arrived or a command asked for it."""
        self._records[placement.id] = PlacementView(
            id=placement.id,
            model=placement.model,
            device=joined(placement.devices),
            cause=placement.cause,
            begun=now,
            waited_s=waited_s,
            weights_bytes=num_bytes * len(placement.devices),
            forced=option.forced,
            victims=tuple(_victim(now, victim) for victim in option.victims),
        )
        if len(self._records) > _PLACEMENTS:
            self._records.popitem(last=False)

    def ended(self, placement_id: int, now: float, outcome: str, load_s: float = 0.0, source: str = "") -> None:
        """Records the outcome of a placement: "ready" or why it did not become ready. load_s: seconds of the load. source: where
        the weights were read from. Only the first call for a placement counts, because what happens to the copy later is not part
        of its placement."""
        record = self._records.get(placement_id)
        if record is not None and not record.outcome:
            record.ended, record.outcome, record.load_s, record.source = now, outcome, load_s, source

    def views(self, model: str = "") -> list[PlacementView]:
        """Returns the recorded placements, the oldest first. model: only placements of this model and those for which it was
        evicted; "": all."""
        return [
            record
            for record in self._records.values()
            if not model or record.model == model or any(victim.name == model for victim in record.victims)
        ]


def _victim(now: float, victim: Resident) -> VictimView:
    idle_s = None if victim.busy else max(0.0, now - victim.last_used)
    return VictimView(victim.name, victim.value, victim.chunks, victim.busy, idle_s)
