"""A checkpoint's bytes into memory that the host cannot write: through the reader's slots, each copied on as it fills."""

from __future__ import annotations

import dataclasses

import numpy as np

from engine.memory.chunk_memory import ChunkMemory
from engine.memory.weight_range import WeightRange
from loader.range_plan import Span
from loader.safetensors import DTYPE_BYTES
from loader.sinks import Fence, HostSink
from loader.sizing import ITEM_BYTES


class DeviceSink:
    """loader.sinks.WeightSink on a mapped range of any device. What has another dtype is converted on the host."""

    memory: memoryview | None = None

    def __init__(self, device: ChunkMemory, weights: WeightRange) -> None:
        self._device, self._address = device, weights.address

    def prepare(self, begin_bytes: int, end_bytes: int) -> None:
        """A device's memory is there once it is mapped."""

    def store(self, span: Span, staged: memoryview) -> None:
        read = np.frombuffer(staged, np.uint8)
        if span.segment.target:
            num_bytes = len(read) // DTYPE_BYTES[span.segment.tensor.dtype] * ITEM_BYTES[span.segment.target]
            read = np.empty(num_bytes, np.uint8)
            at_its_start = dataclasses.replace(span.segment, place_bytes=span.segment.begin - span.begin)
            HostSink(read.data).store(dataclasses.replace(span, segment=at_its_start), staged)
        self._device.write(self._address + span.place_bytes, read)
        if span.segment.target and (fence := self.fence()) is not None:
            fence.wait()  # what was converted is in nobody's slot

    def fence(self) -> Fence | None:
        return self._device.fence()
