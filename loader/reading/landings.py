"""Tells after each read which parts of a model's weight range have become complete. Some tensors can only be used as a whole,
because their numbers are rearranged or their matrices are packed as one; the range of such tensors is reported after the last of
the reads that bring them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from loader.errors import CheckpointError
from loader.formats.relayout import INPUT_ORDER
from loader.formats.weight_format import WeightSlot
from loader.reading.range_plan import Read, Segment, joined
from loader.reading.sinks import WeightSink

Places = Sequence[tuple[int, int]]  # [begin, end) in bytes of the weight range


class Landings:
    """Tracks during one load which parts of a model's weight range (the memory for all its weights) are complete. reads: all reads
    of the load. sink: the destination of the weights. If the inputs of several parameters are to be reordered together
    (WeightSlot.joint), `of` has the sink reorder them once all of these parameters have been stored."""

    def __init__(self, reads: Iterable[Read], sink: WeightSink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._left_bytes: dict[str, int] = {}
        self._slots: dict[str, dict[str, WeightSlot]] = {}  # WeightSlot.joint -> own name -> slot
        self._files: dict[str, str] = {}
        for read in reads:
            for segment in read.segments:
                if (slot := segment.whole) is not None:
                    name = slot.joint or slot.name
                    self._left_bytes[name] = self._left_bytes.get(name, 0) + segment.end - segment.begin
                    self._slots.setdefault(name, {})[slot.name] = slot
                    self._files[slot.name] = segment.tensor.file

    def of(self, read: Read) -> Places:
        """Returns the ranges [begin, end) of the weight range, in bytes, that become complete with a read. Must be called once for
        each read, after all its bytes have been stored, from any thread. Raises CheckpointError if matrices that one matrix
        multiplication reads together have their inputs in different orders, and RuntimeError if the device failed."""
        places: list[tuple[int, int]] = []
        for segment in read.segments:
            if segment.whole is None:
                places += segment.places
            else:
                places += self._of_whole(segment, segment.whole)
        return joined(places)

    def _of_whole(self, segment: Segment, slot: WeightSlot) -> Places:
        name = slot.joint or slot.name
        with self._lock:
            self._left_bytes[name] -= segment.end - segment.begin
            if self._left_bytes[name]:
                return []
        slots = self._slots[name]
        if slot.joint and slot.packed is None:
            self._order(list(slots.values()))
        return [place for one in slots.values() if one.num_bytes for place in one.places]

    def _order(self, slots: list[WeightSlot]) -> None:
        orders = [slot for slot in slots if slot.relayout == INPUT_ORDER]
        for other in orders[1:]:
            if not self._sink.holds_same(orders[0], other):
                why = f"is another order than {orders[0].name}, which is read together with it: not served"
                raise CheckpointError(self._files[other.name], other.name, why)
        for words in slots:
            if words.relayout != INPUT_ORDER:
                self._sink.order_inputs(words, orders[0])
