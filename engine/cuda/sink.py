"""Writes a checkpoint's bytes to device memory that the host cannot write. The reader fills buffers on the host, and each buffer is
copied to the device as soon as it is full. Packed weights are decoded on the device, and the words of AWQ and GPTQ are rearranged
there.
"""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cuda.frames import DeviceFrames, KeptPart
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.weight_range import WeightRange
from loader.architectures.architecture import Cut
from loader.files import frame as frame_layout
from loader.formats.alignment import aligned
from loader.formats.int4_relayout import order_inputs, part_of, rearrange
from loader.formats.relayout import AWQ_WORDS, GPTQ_WORDS, WORDS_AT_ONCE
from loader.formats.weight_format import WeightSlot
from loader.reading.range_plan import Segment, Span
from loader.reading.sinks import Fence, HostSink, check_codes, held_dtype, rearrange_span, row_of_part, stored_rows
from loader.reading.unpack import damaged
from loader.shapes.dtypes import FP8


class DeviceSink:
    """The destination of a load's weights (a loader.reading.sinks.WeightSink) in a mapped address range of any device. Weights that
    change dtype are converted on the host; if they are packed, the host decodes them first. frames: decodes packed weights on the
    device; None: the host decodes all of them."""

    memory: memoryview | None = None

    def __init__(self, device: ChunkMemory, weights: WeightRange, frames: DeviceFrames | None = None) -> None:
        self._device, self._weights, self._address = device, weights, weights.address
        self._frames, self._verdict = frames, None if frames is None else frames.verdict()
        self._lock = threading.Lock()
        self.decoded: list[Segment] = []  # frame number n is decoded[n - 1]

    def prepare(self, begin_bytes: int, end_bytes: int) -> None:
        """Does nothing, because a device's memory can be written once it is mapped."""

    def store(self, span: Span, staged: memoryview) -> None:
        read = np.frombuffer(staged, np.uint8)
        if span.segment.whole is not None:
            self._rearrange(span, span.segment.whole, read)
            return
        is_converted = span.segment.target not in ("", FP8) or span.segment.columns is not None
        if span.segment.target == FP8:
            check_codes(span, read)
        if not is_converted:
            self._device.write(self._address + span.place_bytes, read)
            return
        places = span.segment.places
        firsts = [0, aligned(places[0][1] - places[0][0])]  # where values begin, and where their scales do; only int8 has scales
        held = np.empty(firsts[len(places) - 1] + places[-1][1] - places[-1][0], np.uint8)
        at_its_start = dataclasses.replace(span.segment, place_bytes=span.segment.begin - span.begin, scales_at_bytes=firsts[1])
        HostSink(held.data).store(dataclasses.replace(span, segment=at_its_start), staged)
        for first, (begin, end) in zip(firsts, places, strict=False):
            self._device.write(self._address + begin, held[first : first + end - begin])
        if (fence := self.fence()) is not None:
            fence.wait()  # converted values are in no slot, so nothing else keeps their memory until they are copied

    def _rearrange(self, span: Span, slot: WeightSlot, read: npt.NDArray[np.uint8]) -> None:
        """Writes a span of bytes of a tensor whose layout in memory differs from that in the file. Words of AWQ and GPTQ weights
        are rearranged on the device, a few at a time. All other tensors with a different layout are small and must be checked, so
        the host rearranges them. slot: the whole tensor's place. read: the bytes of the span."""
        assert slot.relayout is not None
        relayout, (rows, first) = slot.relayout, stored_rows(span.segment, read)
        part = part_of(self._held(slot), relayout, row_of_part(slot, first), len(rows))
        if relayout not in (GPTQ_WORDS, AWQ_WORDS):
            on_host = torch.empty(part.shape, dtype=part.dtype)
            rearrange_span(span, slot, rows, first, on_host)
            with self._device.copying():
                part.copy_(on_host)
            return
        at_once = max(1, WORDS_AT_ONCE // (rows.shape[1] * relayout.rows)) * relayout.rows
        with self._lock, self._device.copying():
            for begin in range(0, len(rows), at_once):
                some = rows[begin : begin + at_once]
                on_device = torch.empty(some.shape, dtype=some.dtype, device=self._device.arena.device)
                self._device.write(on_device.data_ptr(), some.view(-1).view(torch.uint8).numpy())
                own = part_of(part, relayout, begin, len(some))
                rearrange(relayout, on_device, first + begin, slot.group_inputs, own, WORDS_AT_ONCE)

    def _held(self, slot: WeightSlot) -> Tensor:
        return self._weights.tensor(slot.offset_bytes, slot.held_shape, held_dtype(slot))

    def holds_same(self, one: WeightSlot, other: WeightSlot) -> bool:
        with self._device.copying():
            return torch.equal(self._held(one), self._held(other))

    def order_inputs(self, words: WeightSlot, order: WeightSlot) -> None:
        with self._lock, self._device.copying():
            order_inputs(self._held(words).view(torch.uint8), self._held(order), WORDS_AT_ONCE)
        if (fence := self.fence()) is not None:
            fence.wait()

    def decode(self, segment: Segment, staged: memoryview) -> bool:
        frame = segment.frame
        if self._frames is None or self._verdict is None or frame is None or segment.target:
            return False
        data, num_values = np.frombuffer(staged, np.uint8), frame.num_bytes // frame_layout.VALUE_BYTES
        with self._lock:
            self.decoded.append(segment)
            number = len(self.decoded)
        if segment.is_whole_frame:
            self._frames.decode(data, self._bits(segment.place_bytes, num_values), self._verdict, number)
            return True
        kept, first = list[KeptPart](), segment.tensor.offset_bytes + frame.first_byte
        for content in segment.contents:
            begin, end = ((at - first) // frame_layout.VALUE_BYTES for at in (content.begin, content.end))
            columns = content.columns or Cut(0, ((0, end - begin),), end - begin)
            ((place, place_end),) = content.places
            out = self._bits(place, (place_end - place) // frame_layout.VALUE_BYTES)
            kept.append(KeptPart(begin, end, columns, out))
        self._frames.decode_parts(data, num_values, kept, self._verdict, number)
        return True

    def _bits(self, place_bytes: int, num_values: int) -> Tensor:
        return self._weights.tensor(place_bytes, (num_values,), torch.int16)

    def fence(self) -> Fence | None:
        return self._device.fence()

    def finish(self) -> None:
        if self._frames is None or self._verdict is None or not self.decoded:
            return
        number = self._frames.refused(self._verdict)
        if number:
            raise damaged(self.decoded[number - 1], "are no packed weights: its codes ask for other escapes than it has")
