"""Makes steps that run while their model's weights arrive wait: for each layer's weights before the layer is computed, and at the
end of the step until all weights have arrived and passed their checks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from engine.memory.weight_arrivals import WeightArrivals, parameter_places
from loader.formats.weight_format import WeightSlot

Layer = TypeVar("Layer")


class WeightsWithdrawn(Exception):
    """Raised in a step that runs while its model's weights arrive, if the step's results are invalid: the load has failed, was
    cancelled, or starts over from another source."""


class WeightGate:
    """The gate between the load of a model's weights and the steps that run during the load. layout: the weights' places, as
    loader.sizes.layout.weight_layout returns them, each with the stage of the forward pass that needs it.

    The threads that read weights report bytes that have arrived (`landed`). A stage is open when all bytes of its parameters have
    arrived. begun: called once, by any thread, when the first stage opens; None: nothing is called. No step ends before `open` was
    called, and the load calls it only after the checks that need all weights, so no step ends with bad weights."""

    def __init__(self, layout: Iterable[WeightSlot]) -> None:
        slots = list(layout)
        stage_of = {slot.name: slot.stage for slot in slots}
        places = [(begin, end, stage_of[name]) for begin, end, name in parameter_places(slots)]
        self._arrivals = WeightArrivals(places, 1 + max(stage_of.values(), default=0))
        self._changed = threading.Condition()
        self._num_inside = 0
        self._withdrawn = ""  # why the weights were withdrawn; "": they were not withdrawn
        self._all = False
        self.begun: Callable[[], None] | None = None
        self.waited_s = 0.0  # seconds that steps waited for weights

    # ---- the load

    def landed(self, begin_bytes: int, end_bytes: int) -> None:
        """Records that the bytes from begin_bytes to before end_bytes of the weight range have arrived, and opens the stages that
        are then complete. Called from any thread, once for each byte. Bytes between parameters are ignored."""
        with self._changed:
            self._arrivals.landed(begin_bytes, end_bytes)
            self._changed.notify_all()
            begun = None
            if self._is_there(0):
                begun, self.begun = self.begun, None
        if begun is not None:
            begun()

    def open(self) -> None:
        """Declares that all weights have arrived and passed their checks, so that steps may end."""
        with self._changed:
            self._all = True
            self._changed.notify_all()

    def withdraw(self, why: str) -> None:
        """Makes running and later steps raise WeightsWithdrawn with the text `why`. Returns when no step reads the weights any
        more."""
        with self._changed:
            self._withdrawn = why
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_inside)

    def begin_anew(self) -> None:
        """Withdraws the weights from running steps and closes all stages, because the weights will arrive again from another
        source. Later steps may begin."""
        self.withdraw("they are read again")
        with self._changed:
            self._withdrawn = ""
            self._arrivals.begin_anew()

    # ---- the step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Returns a context manager for the part of a step that reads the weights; `withdraw` waits until the context is left.
        Raises WeightsWithdrawn if the weights were withdrawn."""
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
        """Yields each of a model's layers (`layers`, in order) once the layer's weights have arrived. After the last layer, waits
        until `open` is called. Raises WeightsWithdrawn if the weights are withdrawn meanwhile."""
        for stage, layer in enumerate(layers, 1):
            self.wait(stage)
            yield layer
        self._wait(lambda: self._all)

    def wait(self, stage: int) -> None:
        """Waits until all weights that a stage of the forward pass needs have arrived. stage: 0 for what comes before the layers, n
        + 1 for layer n. Raises WeightsWithdrawn if the weights are withdrawn meanwhile."""
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
