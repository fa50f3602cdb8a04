"""Counts how many bytes of a model's weights have yet to arrive, for each group of weights. Groups are the stages of a forward
pass, or the slots of a copy in the host tier.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from loader.formats.weight_format import WeightSlot


def parameter_places(layout: Iterable[WeightSlot]) -> list[tuple[int, int, str]]:
    """Returns the places that a load fills, as (begin, end, parameter name): the values of each parameter and, if the load
    quantises it, its scales. begin and end are bytes in the weight range, end exclusive. layout: what weight_layout of
    loader.sizes.layout returns."""
    return [(*place, slot.name) for slot in layout for place in slot.places]


class WeightArrivals:
    """Counts, for each group of places in a weight range, the bytes that have yet to arrive there: left_bytes[group]. places:
    (begin, end, group), begin and end in bytes of the weight range; places do not overlap, and groups are numbered from 0. Bytes
    between places belong to no group. Not thread-safe."""

    def __init__(self, places: Iterable[tuple[int, int, int]], num_groups: int) -> None:
        self._places = sorted(place for place in places if place[1] > place[0])
        self._ends = [end for _, end, _ in self._places]
        self.left_bytes = [0] * num_groups
        self.begin_anew()

    def begin_anew(self) -> None:
        """Sets left_bytes of each group to the group's full size, because all bytes will arrive again."""
        self.left_bytes = [0] * len(self.left_bytes)
        for begin, end, group in self._places:
            self.left_bytes[group] += end - begin

    def landed(self, begin_bytes: int, end_bytes: int) -> list[int]:
        """Records that the bytes from begin_bytes to before end_bytes have arrived; each byte may be reported only once. Returns
        the numbers of the groups that these bytes completed."""
        whole = []
        for begin, end, group in self._places[bisect_right(self._ends, begin_bytes) :]:
            if begin >= end_bytes:
                break
            before = self.left_bytes[group]
            self.left_bytes[group] = before - (min(end, end_bytes) - max(begin, begin_bytes))
            if self.left_bytes[group] <= 0 < before:
                whole.append(group)
        return whole
