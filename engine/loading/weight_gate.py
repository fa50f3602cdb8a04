"""How far a model's weights have come, for a step that runs behind them: it waits for each layer, and at its end for all of it."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from loader.range_plan import Read, stages
from loader.sizing import SCALE_BYTES, WeightSlot

Layer = TypeVar("Layer")


class WeightsWithdrawn(Exception):
    """What the step has computed is void: the load has failed, was cancelled, or begins anew from other bytes."""


class WeightGate:
    """Of one load. layout: sizing.weight_layout's; stages as range_plan.stages counts them.

    The readers tell what `landed`; a stage is open when all bytes of its parameters have; `begun`, if it is set, is called once
    when the first one is, by any thread. What only the whole proves (checksums, a file that changed) is proven before `open`, so no
    step ends on weights that are not good.
    """

    def __init__(self, layout: Iterable[WeightSlot]) -> None:
        slots = list(layout)
        stage_of = stages(slots)
        places = [(slot.offset_bytes, slot.offset_bytes + slot.num_bytes, stage_of[slot.name]) for slot in slots]
        for slot in slots:
            if slot.scales_at_bytes >= 0:
                end = slot.scales_at_bytes + slot.shape[0] * SCALE_BYTES
                places.append((slot.scales_at_bytes, end, stage_of[slot.name]))
        self._places = sorted(place for place in places if place[1] > place[0])
        self._ends = [end for _, end, _ in self._places]
        self._left_bytes = self._whole()
        self._changed = threading.Condition()
        self._num_inside = 0
        self._withdrawn = ""  # why
        self._all = False
        self.begun: Callable[[], None] | None = None
        self.waited_s = 0.0  # by steps, for weights

    def _whole(self) -> list[int]:
        left = [0] * (1 + max((stage for _, _, stage in self._places), default=0))
        for begin, end, stage in self._places:
            left[stage] += end - begin
        return left

    # ---- the load

    def landed(self, begin_bytes: int, end_bytes: int) -> None:
        """These bytes of the weight range are there; from any thread, each byte once. What lies between parameters counts for
        nothing."""
        with self._changed:
            for begin, end, stage in self._places[bisect_right(self._ends, begin_bytes) :]:
                if begin >= end_bytes:
                    break
                self._left_bytes[stage] -= min(end, end_bytes) - max(begin, begin_bytes)
            self._changed.notify_all()
            begun = None
            if self._left_bytes[0] <= 0:
                begun, self.begun = self.begun, None
        if begun is not None:
            begun()

    def read_landed(self, read: Read) -> None:
        for begin_bytes, end_bytes in read.places:
            self.landed(begin_bytes, end_bytes)

    def open(self) -> None:
        """Everything is there, and good."""
        with self._changed:
            self._all = True
            self._changed.notify_all()

    def withdraw(self, why: str) -> None:
        """Returns when no step reads the weights any more; the next one does not begin."""
        with self._changed:
            self._withdrawn = why
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_inside)

    def begin_anew(self) -> None:
        """The weights come once more, from elsewhere."""
        self.withdraw("they are read again")
        with self._changed:
            self._withdrawn = ""
            self._left_bytes = self._whole()

    # ---- the step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all that reads the weights. Raises WeightsWithdrawn."""
        with self._changed:
            self._raise_withdrawn()
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    def behind(self, layers: Iterable[Layer]) -> Iterator[Layer]:
        """Each layer once its weights are there; ends when all are. Raises WeightsWithdrawn."""
        for stage, layer in enumerate(layers, 1):
            self.wait(stage)
            yield layer
        self._wait(lambda: self._all)

    def wait(self, stage: int) -> None:
        """Raises WeightsWithdrawn."""
        self._wait(lambda: self._left_bytes[stage] <= 0)

    def _wait(self, ready: Callable[[], bool]) -> None:
        begin_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: ready() or bool(self._withdrawn))
            self._raise_withdrawn()
        self.waited_s += time.perf_counter() - begin_s

    def _raise_withdrawn(self) -> None:
        if self._withdrawn:
            raise WeightsWithdrawn(self._withdrawn)
