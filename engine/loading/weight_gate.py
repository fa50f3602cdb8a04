"""How far a model's weights have come, for a step that runs behind them: it waits for each layer, and at its end for all of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from engine.loading.weight_arrivals import WeightArrivals, parameter_places
from loader.formats.weight_format import WeightSlot

Layer = TypeVar("Layer")


class WeightsWithdrawn(Exception):
    """What the step has computed is void: the load has failed, was cancelled, or begins anew from other bytes."""


class WeightGate:
    """Of one load. layout: loader.layout.weight_layout's; its slots tell the stages.

    The readers tell what `landed`; a stage is open when all bytes of its parameters have; `begun`, if it is set, is called once
    when the first one is, by any thread. What only the whole proves (checksums, a file that changed) is proven before `open`, so no
    step ends on weights that are not good.
    """

    def __init__(self, layout: Iterable[WeightSlot]) -> None:
        slots = list(layout)
        stage_of = {slot.name: slot.stage for slot in slots}
        places = [(begin, end, stage_of[name]) for begin, end, name in parameter_places(slots)]
        self._arrivals = WeightArrivals(places, 1 + max(stage_of.values(), default=0))
        self._changed = threading.Condition()
        self._num_inside = 0
        self._withdrawn = ""  # why
        self._all = False
        self.begun: Callable[[], None] | None = None
        self.waited_s = 0.0  # by steps, for weights

    # ---- the load

    def landed(self, begin_bytes: int, end_bytes: int) -> None:
        """These bytes of the weight range are there; from any thread, each byte once. What lies between parameters counts for
        nothing."""
        with self._changed:
            self._arrivals.landed(begin_bytes, end_bytes)
            self._changed.notify_all()
            begun = None
            if self._is_there(0):
                begun, self.begun = self.begun, None
        if begun is not None:
            begun()

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
            self._arrivals.begin_anew()

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
        self._wait(lambda: self._is_there(stage))

    def _is_there(self, stage: int) -> bool:
        return self._arrivals.left_bytes[stage] <= 0

    def _wait(self, ready: Callable[[], bool]) -> None:
        begin_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: ready() or bool(self._withdrawn))
            self._raise_withdrawn()
        self.waited_s += time.perf_counter() - begin_s

    def _raise_withdrawn(self) -> None:
        if self._withdrawn:
            raise WeightsWithdrawn(self._withdrawn)
