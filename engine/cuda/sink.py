"""Writes a checkpoint's bytes to device memory that the host cannot write: reads fill the reader's slots, and each slot is copied
to the device as soon as it is full. Packed weights are copied as they are and decoded there.
"""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import torch

from engine.cuda.frames import DeviceFrames
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.weight_range import WeightRange
from loader.dtypes import FP8
from loader.range_plan import Segment, Span
from loader.sinks import Fence, HostSink, check_codes
from loader.unpack import damaged


class DeviceSink:
    """The loader.sinks.WeightSink for a mapped range of any device. Weights that change dtype are converted on the host, and packed
    ones among them are decoded there first. frames: None if the host decodes everything."""

    memory: memoryview | None = None

    def __init__(self, device: ChunkMemory, weights: WeightRange, frames: DeviceFrames | None = None) -> None:
        self._device, self._weights, self._address = device, weights, weights.address
        self._frames, self._verdict = frames, None if frames is None else frames.verdict()
        self._lock = threading.Lock()
        self.decoded: list[Segment] = []  # frame number n is decoded[n - 1]

    def prepare(self, begin_bytes: int, end_bytes: int) -> None:
        """Does nothing: a device's memory exists once it is mapped."""

    def store(self, span: Span, staged: memoryview) -> None:
        read = np.frombuffer(staged, np.uint8)
        is_converted = span.segment.target not in ("", FP8)
        if span.segment.target == FP8:
            check_codes(span, read)
        if is_converted:
            ((begin, end),) = span.segment.places  # one of a whole segment: int8, which needs two, is kept from GPUs
            read = np.empty(end - begin, np.uint8)
            at_its_start = dataclasses.replace(span.segment, place_bytes=span.segment.begin - span.begin)
            HostSink(read.data).store(dataclasses.replace(span, segment=at_its_start), staged)
        self._device.write(self._address + span.place_bytes, read)
        if is_converted and (fence := self.fence()) is not None:
            fence.wait()  # converted values are in no slot, so nothing else keeps them until they are copied

    def decode(self, segment: Segment, staged: memoryview) -> bool:
        frame, content = segment.frame, segment.content
        if self._frames is None or self._verdict is None or frame is None or content is None or content.target:
            return False
        out = self._weights.tensor(content.place_bytes, (frame.num_bytes // 2,), torch.int16)
        with self._lock:
            self.decoded.append(segment)
            number = len(self.decoded)
        self._frames.decode(np.frombuffer(staged, np.uint8), out, self._verdict, number)
        return True

    def fence(self) -> Fence | None:
        return self._device.fence()

    def finish(self) -> None:
        if self._frames is None or self._verdict is None or not self.decoded:
            return
        number = self._frames.refused(self._verdict)
        if number:
            raise damaged(self.decoded[number - 1], "are no packed weights: its codes ask for other escapes than it has")
