"""Where weights go. A sink owns the model's weight range on one kind of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from loader.dtypes import ITEM_BYTES
from loader.errors import CheckpointError
from loader.formats.int8 import SCALE_BYTES
from loader.formats.int8_rows import quantize_rows
from loader.range_plan import QUANTIZED, Segment, Span
from loader.safetensors import DTYPE_BYTES

# Elements converted at a time: torch runs that many without waking its thread pool, which belongs to the model that is stepping.
CONVERT_ELEMENTS = 32768

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Fence(Protocol):
    """A point that copies to a device have to pass."""

    def wait(self) -> None:
        """Sleeps until everything started before it is over; from any thread. Raises RuntimeError if the device failed."""
        ...


class WeightSink(Protocol):
    """Used by several reader threads at once, each with spans of its own.

    memory: the weight range where reads may land in it, else None: then everything comes through slots.
    """

    memory: memoryview | None

    def prepare(self, begin_bytes: int, end_bytes: int) -> None:
        """This part of the range is about to be filled: has the system provide its memory, where that is not there yet."""
        ...

    def store(self, span: Span, staged: memoryview) -> None:
        """Starts bringing the span's bytes, which `staged` holds, to their place: they are to stay in `staged` until a fence taken
        afterwards is passed. Raises CheckpointError for weights that cannot be stored, RuntimeError if the device failed."""
        ...

    def decode(self, segment: Segment, staged: memoryview) -> bool:
        """Starts decoding a packed frame, whose checksum was compared, to its place, as `store` does. False where that is the
        host's to do. Raises FrameError."""
        ...

    def fence(self) -> Fence | None:
        """Behind all that was stored so far; None if that is at its place already."""
        ...

    def finish(self) -> None:
        """Returns when all that was stored and decoded is at its place. Raises CheckpointError for a frame that could not be
        decoded."""
        ...


class HostSink:
    """The range is this process's own memory. memory: writable, laid out by layout.weight_layout; prepare: see WeightSink."""

    def __init__(self, memory: memoryview, prepare: Callable[[int, int], None] = lambda begin_bytes, end_bytes: None) -> None:
        self.memory: memoryview | None = memory
        self._prepare = prepare
        self._bytes = np.frombuffer(memory, np.uint8)

    def prepare(self, begin_bytes: int, end_bytes: int) -> None:
        self._prepare(begin_bytes, end_bytes)

    def store(self, span: Span, staged: memoryview) -> None:
        segment = span.segment
        read = np.frombuffer(staged, np.uint8)
        if segment.target == QUANTIZED:
            self._quantize(span, read)
            return
        if not segment.target:
            self._bytes[span.place_bytes : span.place_bytes + len(read)] = read
            return
        source = torch.from_numpy(read).view(_STORED[segment.tensor.dtype])
        num_bytes = len(read) // DTYPE_BYTES[segment.tensor.dtype] * ITEM_BYTES[segment.target]
        place = torch.from_numpy(self._bytes[span.place_bytes : span.place_bytes + num_bytes])
        held = place.view(getattr(torch, segment.target))
        for at in range(0, source.numel(), CONVERT_ELEMENTS):
            held[at : at + CONVERT_ELEMENTS].copy_(source[at : at + CONVERT_ELEMENTS])

    def _quantize(self, span: Span, read: npt.NDArray[np.uint8]) -> None:
        """A whole segment. Raises CheckpointError for weights that are not finite."""
        segment = span.segment
        rows = torch.from_numpy(read).view(_STORED[segment.tensor.dtype]).view(-1, segment.width)
        values = torch.from_numpy(self._bytes[segment.place_bytes : segment.place_bytes + rows.numel()])
        scales_end = segment.scales_at_bytes + len(rows) * SCALE_BYTES
        scales = torch.from_numpy(self._bytes[segment.scales_at_bytes : scales_end])
        try:
            quantize_rows(rows, values.view(torch.int8).view(rows.shape), scales.view(torch.float32))
        except ValueError as error:
            tensor = segment.tensor
            raise CheckpointError(tensor.file, tensor.name, f"{error} (within bytes {span.begin} to {span.end})") from None

    def decode(self, segment: Segment, staged: memoryview) -> bool:
        return False

    def fence(self) -> Fence | None:
        return None

    def finish(self) -> None:
        """Everything is as it was stored."""
