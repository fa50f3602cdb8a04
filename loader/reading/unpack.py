"""Checks the frames of packed files (pieces that can each be decoded alone) and stores their values as weights. A frame is decoded
by the sink's device or by the host; the host decodes directly into the weight range if possible. If a device's share of a split
model needs only a part of a frame, only that part is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from loader.errors import CheckpointError
from loader.files.frame import FrameError
from loader.files.packed import Frame
from loader.packing import codec
from loader.reading.range_plan import Segment, Span
from loader.reading.sinks import WeightSink
from loader.reading.thread_buffer import ThreadBuffer


@dataclass(slots=True, frozen=True)
class Decoder:
    """An implementation of the two functions of the packed format: decode(frame, out) unpacks a frame, a piece of a packed file,
    into bfloat16 values, and sum_of(frame) returns its checksum (loader/packing/codec.py). Frames are contiguous uint8 arrays,
    usually aligned to 64 bytes. name: the implementation's name, in logs and in the keys of read rates."""

    name: str = "numpy"
    decode: Callable[[Any, Any], None] = codec.decode
    sum_of: Callable[[Any], int] = codec.sum_of


class Unpacker:
    """Checks the frames of packed files (pieces that can each be decoded alone) and stores their weights in the model's weight
    range, for one load. Several threads may use it at once. sink: the destination of the weights. decoder: computes checksums, and
    decodes frames if the sink's device does not."""

    def __init__(self, sink: WeightSink, decoder: Decoder) -> None:
        self._sink, self._decoder = sink, decoder
        self._memory = None if sink.memory is None else np.frombuffer(sink.memory, np.uint8)
        self._scratch = ThreadBuffer()

    def store(self, segment: Segment, staged: memoryview) -> None:
        """Checks a frame, a piece of a packed file, and starts decoding it and moving its weights to the model's weight range.
        segment: the frame. staged: the frame's bytes, which must not change until the fence that a later call of the sink's `fence`
        returns is passed. Raises CheckpointError, which names file, tensor and offset, for a damaged frame."""
        frame = segment.frame
        assert frame is not None
        data = np.frombuffer(staged, np.uint8)
        if self._decoder.sum_of(data) != frame.sum:
            raise damaged(segment, "don't match their checksum")
        if not frame.packed:
            self._store(segment, frame, staged)
            return
        try:
            self._decode(segment, frame, data)
        except FrameError as error:
            raise damaged(segment, f"are no packed weights: {error}") from None

    def _decode(self, segment: Segment, frame: Frame, data: Any) -> None:
        if self._sink.decode(segment, data.data):
            return
        in_place = self._memory is not None and segment.is_whole_frame and not segment.target
        if in_place:
            assert self._memory is not None
            out = self._memory[segment.place_bytes : segment.place_bytes + frame.num_bytes]
        else:
            out = self._scratch.take(frame.num_bytes)
        self._decoder.decode(data, out.view(np.uint16))
        if not in_place:
            self._store(segment, frame, out.data)
            fence = self._sink.fence()
            if fence is not None:  # the next frame is decoded into the same buffer
                fence.wait()

    def _store(self, segment: Segment, frame: Frame, unpacked: memoryview) -> None:
        """Starts moving the values of a decoded frame (piece of a packed file) to their offsets in the weight range. Values that
        the segment's contents leave out are skipped. unpacked: the values of the whole frame."""
        first = segment.tensor.offset_bytes + frame.first_byte
        for content in segment.contents:
            self._sink.store(Span(content, content.begin, content.end), unpacked[content.begin - first : content.end - first])


def damaged(segment: Segment, why: str) -> CheckpointError:
    """Returns the error for a damaged segment, which names the segment's file, tensor and bytes. why: the rest of the sentence that
    begins with "bytes A to B"."""
    tensor = segment.tensor
    return CheckpointError(tensor.file, tensor.name, f"bytes {segment.begin} to {segment.end} {why}")
