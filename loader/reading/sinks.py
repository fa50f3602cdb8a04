"""Defines sinks, the destinations of weights. A sink writes to a model's weight range (the memory for all its weights), on one kind
of device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from loader.architectures.architecture import Cut
from loader.errors import CheckpointError
from loader.files.safetensors import DTYPE_BYTES
from loader.formats.fp8_values import fill_scales, nan_at
from loader.formats.int4_relayout import order_inputs, part_of, rearrange
from loader.formats.int4_scales import narrow_scales
from loader.formats.int8_rows import quantize_rows
from loader.formats.packed_rows import pack_rows
from loader.formats.weight_format import SCALE_BYTES, WeightSlot
from loader.reading.panel_packer import PackRows, PanelPacker
from loader.reading.range_plan import PACKED, QUANTIZED, SCALES, Segment, Span
from loader.shapes.dtypes import E8M0, FLOAT_OF, FP8, ITEM_BYTES, SCALES_IN

# Elements converted at a time: few enough that torch does not wake its thread pool, which belongs to the model whose step runs.
CONVERT_ELEMENTS = 32768

_NAN_SCALE = 255  # code of NaN in E8M0
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I32": torch.int32}
_STORED |= {"I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.uint8}  # int8 values and codes
_AS_STORED = ("", FP8, E8M0)  # targets whose bytes are stored unchanged


class Fence(Protocol):
    """A point in the order of copies to a device. The fence is passed when every copy that was started before this point has
    ended."""

    def wait(self) -> None:
        """Blocks the calling thread until the fence is passed. May be called from any thread. Raises RuntimeError if the device
        failed."""
        ...


class WeightSink(Protocol):
    """The destination of a load's weights: a model's weight range (the memory for all its weights) on a device. Several reader
    threads use a sink at once, each with different spans (parts of reads).

    memory: the weight range, if reads may write to it directly; None: all bytes go through staging slots."""

    memory: memoryview | None

    def prepare(self, begin_bytes: int, end_bytes: int) -> None:
        """Announces that bytes [begin_bytes, end_bytes) of the model's weight range are about to be filled. If no memory lies
        behind these addresses yet, the sink makes the system provide it."""
        ...

    def store(self, span: Span, staged: memoryview) -> None:
        """Starts moving the bytes of a span, a part of a read, to their offset in the weight range. staged: the bytes, which must
        not change until the copy has ended, that is, until the fence that a later call of `fence` returns is passed. Raises
        CheckpointError for weights that cannot be stored, RuntimeError if the device failed."""
        ...

    def decode(self, segment: Segment, staged: memoryview) -> bool:
        """Starts decoding a packed frame, whose checksum has been verified, into the weight range, and returns True. Returns False
        if the sink cannot decode this frame; the caller must then decode the frame on the host. segment: the frame. staged: the
        frame's bytes, which must not change until the fence that a later call of `fence` returns is passed. Raises FrameError for a
        frame that is not valid."""
        ...

    def fence(self) -> Fence | None:
        """Returns a fence, on which the caller can wait until everything that was stored so far is in the weight range; None if
        nothing is being copied."""
        ...

    def holds_same(self, one: WeightSlot, other: WeightSlot) -> bool:
        """Returns whether two parameters have equal bytes in memory. Both must have been stored completely."""
        ...

    def order_inputs(self, words: WeightSlot, order: WeightSlot) -> None:
        """Reorders the inputs (columns) of INT4 weights that are in memory, and returns when it is done. words: the weights. order:
        the parameter that holds, for each new position, the index of the input that goes there."""
        ...

    def finish(self) -> None:
        """Waits until everything that was stored and decoded is in the weight range. Raises CheckpointError for a frame that could
        not be decoded."""
        ...


def _check_scales(span: Span, read: npt.NDArray[np.uint8]) -> None:
    """Raises CheckpointError if one of the scales in a span (part of a read), stored as exponents (E8M0), is NaN. read: the span's
    bytes."""
    if (read == _NAN_SCALE).any():
        tensor = span.segment.tensor
        raise CheckpointError(tensor.file, tensor.name, f"holds the scale NaN (within bytes {span.begin} to {span.end})")


def _convert(stored: torch.Tensor, held: torch.Tensor) -> None:
    held.copy_(stored)


def _in_parts(write: Callable[[torch.Tensor, torch.Tensor], None], stored: torch.Tensor, held: torch.Tensor) -> None:
    """Converts stored numbers to the form in which they are held, CONVERT_ELEMENTS at a time, which needs little memory.
    write(stored part, held part): converts one part. stored, held: tensors [N]."""
    for at in range(0, stored.numel(), CONVERT_ELEMENTS):
        some = slice(at, at + CONVERT_ELEMENTS)
        write(stored[some], held[some])


@contextmanager
def _of_span(span: Span) -> Iterator[None]:
    """Returns a context manager that turns a ValueError about the values stored in a span (part of a read) into a CheckpointError.
    The CheckpointError names the tensor and the range of the tensor's bytes that the span contains."""
    try:
        yield
    except ValueError as error:
        tensor = span.segment.tensor
        raise CheckpointError(tensor.file, tensor.name, f"{error} (within bytes {span.begin} to {span.end})") from None


class HostSink:
    """The destination of a load's weights (WeightSink) if a model's weight range is this process's own memory. memory: the range,
    writable, laid out by layout.weight_layout. prepare(begin, end): called before bytes [begin, end) of the range are filled.
    pack_rows: the implementation of loader.formats.packed_rows.pack_rows for matrices that stay packed."""

    def __init__(
        self,
        memory: memoryview,
        prepare: Callable[[int, int], None] = lambda begin_bytes, end_bytes: None,
        pack_rows: PackRows = pack_rows,
    ) -> None:
        self.memory: memoryview | None = memory
        self._prepare = prepare
        self._bytes = np.frombuffer(memory, np.uint8)
        self._packer = PanelPacker(self._bytes, pack_rows)

    def prepare(self, begin_bytes: int, end_bytes: int) -> None:
        self._prepare(begin_bytes, end_bytes)

    def store(self, span: Span, staged: memoryview) -> None:
        segment = span.segment
        read = np.frombuffer(staged, np.uint8)
        if (slot := segment.whole) is not None and slot.relayout is not None:
            rows, first = stored_rows(segment, read)
            own = part_of(self._held(slot), slot.relayout, row_of_part(slot, first), len(rows))
            rearrange_span(span, slot, rows, first, own)
            return
        if segment.target == QUANTIZED:
            self._quantize(span, read)
            return
        if segment.target == PACKED:
            self._pack(span, read)
            return
        if segment.target == SCALES:
            self._fill_scales(span, read)
            return
        if segment.target == FP8:
            check_codes(span, read)
        if segment.target == E8M0:
            _check_scales(span, read)
        if segment.columns is not None and segment.target not in SCALES_IN.values():
            self._store_columns(span, segment.columns, read)
            return
        read = _kept(segment, read)
        if segment.target in _AS_STORED:
            self._bytes[span.place_bytes : span.place_bytes + len(read)] = read
            return
        source = torch.from_numpy(read).view(_STORED[segment.tensor.dtype])
        num_bytes = len(read) // DTYPE_BYTES[segment.tensor.dtype] * ITEM_BYTES[segment.target]
        place = torch.from_numpy(self._bytes[span.place_bytes : span.place_bytes + num_bytes])
        held = place.view(getattr(torch, FLOAT_OF[segment.target]))
        write = narrow_scales if segment.target in SCALES_IN.values() else _convert
        with _of_span(span):
            _in_parts(write, source, held)

    def _store_columns(self, span: Span, columns: Cut, read: npt.NDArray[np.uint8]) -> None:
        """Writes the kept columns of a span's rows to their destination in the weight range, converted to the dtype in memory. The
        span must be a whole segment (consecutive elements of one tensor that are read together), because columns can be cut only
        from complete rows. columns: the columns that are kept. read: the span's bytes."""
        segment = span.segment
        ((begin, end),) = segment.places
        if segment.target in _AS_STORED:  # numpy copies parts of rows faster than torch does, and in this thread
            item_bytes, first = DTYPE_BYTES[segment.tensor.dtype], 0
            rows = read.reshape(-1, columns.whole * item_bytes)
            own = self._bytes[begin:end].reshape(-1, columns.length * item_bytes)
            for left, right in columns.ranges:
                last = first + (right - left) * item_bytes
                own[:, first:last] = rows[:, left * item_bytes : right * item_bytes]
                first = last
            return
        stored = torch.from_numpy(read).view(_STORED[segment.tensor.dtype]).view(-1, columns.whole)
        held = torch.from_numpy(self._bytes[begin:end]).view(getattr(torch, segment.target)).view(-1, columns.length)
        kept = [stored[:, first:last] for first, last in columns.ranges]
        for source, to in zip(kept, held.split([part.shape[1] for part in kept], dim=1), strict=True):
            width = source.shape[1]
            num_rows = max(1, CONVERT_ELEMENTS // width)
            for row in range(0, len(source), num_rows):
                for column in range(0, width, CONVERT_ELEMENTS):
                    some = slice(row, row + num_rows), slice(column, column + CONVERT_ELEMENTS)
                    to[some].copy_(source[some])

    def _held(self, slot: WeightSlot) -> torch.Tensor:
        """Returns the memory of a parameter as a tensor with the parameter's dtype and shape in memory. Only for a parameter whose
        numbers are rearranged by the loader, that is, whose slot.relayout is not None."""
        place = torch.from_numpy(self._bytes[slot.offset_bytes : slot.offset_bytes + slot.num_bytes])
        return place.view(held_dtype(slot)).view(slot.held_shape)

    def holds_same(self, one: WeightSlot, other: WeightSlot) -> bool:
        return torch.equal(self._held(one), self._held(other))

    def order_inputs(self, words: WeightSlot, order: WeightSlot) -> None:
        order_inputs(self._held(words).view(torch.uint8), self._held(order), CONVERT_ELEMENTS)

    def _quantize(self, span: Span, read: npt.NDArray[np.uint8]) -> None:
        """Rounds the rows of a span to int8, and writes values and scales to their offsets in the weight range. The span must be a
        whole segment of a read, not a part of one. read: the span's bytes. Raises CheckpointError for weights that are not
        finite."""
        segment = span.segment
        width = segment.width if segment.columns is None else segment.columns.length
        rows = torch.from_numpy(_kept(segment, read)).view(_STORED[segment.tensor.dtype]).view(-1, width)
        values = torch.from_numpy(self._bytes[segment.place_bytes : segment.place_bytes + rows.numel()])
        scales_end = segment.scales_at_bytes + len(rows) * SCALE_BYTES
        scales = torch.from_numpy(self._bytes[segment.scales_at_bytes : scales_end])
        with _of_span(span):
            quantize_rows(rows, values.view(torch.int8).view(rows.shape), scales.view(torch.float32))

    def _pack(self, span: Span, read: npt.NDArray[np.uint8]) -> None:
        """Packs the rows of a span into a matrix that stays packed in memory. The span must be a whole segment of a read, not a
        part of one. read: the span's bytes. Raises CheckpointError if the matrix cannot stay packed, because there is no space for
        its escapes (exponents that have no three-bit code)."""
        segment = span.segment
        assert segment.whole is not None
        assert segment.whole.packed is not None
        width = segment.width if segment.columns is None else segment.columns.length
        stored = torch.from_numpy(_kept(segment, read)).view(_STORED[segment.tensor.dtype])
        if stored.dtype != torch.bfloat16:
            held = torch.empty(stored.numel(), dtype=torch.bfloat16)
            _in_parts(_convert, stored, held)
            stored = held
        bits = np.require(stored.view(-1, width).view(torch.uint16).numpy(), requirements=("C", "ALIGNED", "WRITEABLE"))
        with _of_span(span):
            self._packer.add(segment.whole.packed, segment.rows[0], bits)

    def _fill_scales(self, span: Span, read: npt.NDArray[np.uint8]) -> None:
        """Writes the scales of a matrix to their offset in the weight range, in float32. span: a whole segment of a read, with all
        these scales. read: the span's bytes. Raises CheckpointError for scales that are not finite."""
        segment = span.segment
        stored = torch.from_numpy(read).view(_STORED[segment.tensor.dtype])
        place = torch.from_numpy(self._bytes[segment.place_bytes : segment.place_bytes + segment.held_bytes])
        rows = len(stored) if len(segment.tensor.shape) < 2 else segment.tensor.shape[0]
        try:
            fill_scales(stored.view(rows, -1), segment.repeats, place.view(torch.float32), segment.inverse, segment.kept)
        except ValueError as error:
            raise CheckpointError(segment.tensor.file, segment.tensor.name, str(error)) from None

    def decode(self, segment: Segment, staged: memoryview) -> bool:
        return False

    def fence(self) -> Fence | None:
        return None

    def finish(self) -> None:
        """Does nothing: `store` of this sink returns only when the bytes are stored."""


def held_dtype(slot: WeightSlot) -> torch.dtype:
    """Returns the dtype in memory of a parameter that is rearranged on loading."""
    dtype: torch.dtype = getattr(torch, FLOAT_OF.get(slot.held_as, slot.held_as))
    return dtype


def stored_rows(segment: Segment, read: npt.NDArray[np.uint8]) -> tuple[torch.Tensor, int]:
    """Returns (the rows of a segment of a rearranged tensor, the index of the first of these rows in the stored tensor). Columns
    that are not in the device's share of a split model are left out. read: the segment's bytes."""
    shape = segment.tensor.shape
    row_bytes = math.prod(shape[1:]) * DTYPE_BYTES[segment.tensor.dtype]
    inner = shape[1:] if segment.columns is None else (segment.columns.length,)
    rows = torch.from_numpy(_kept(segment, read)).view(_STORED[segment.tensor.dtype]).view(-1, *inner)
    return rows, (segment.begin - segment.tensor.offset_bytes) // row_bytes


def row_of_part(slot: WeightSlot, stored: int) -> int:
    """Returns the index of a row within the device's part of a stored tensor. slot: the part. stored: the row's index in the whole
    tensor."""
    if (cut := slot.cut) is None or cut.axis:
        return stored
    return sum(min(end, stored) - begin for begin, end in cut.ranges if begin < stored)


def _kept(segment: Segment, read: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Returns the bytes of the kept columns (Segment.columns) of a segment's rows. read: all bytes of the segment. The result is a
    copy, made by NumPy in the calling thread."""
    if (columns := segment.columns) is None:
        return read
    item_bytes = DTYPE_BYTES[segment.tensor.dtype]
    rows = read.reshape(-1, columns.whole * item_bytes)
    return np.concatenate([rows[:, begin * item_bytes : end * item_bytes] for begin, end in columns.ranges], axis=1).reshape(-1)


def rearrange_span(span: Span, slot: WeightSlot, rows: torch.Tensor, first: int, part: torch.Tensor) -> None:
    """Writes the rows of a span to memory in the order in which kernels read them. The span must be a whole segment of a read, not
    a part of one. slot: the tensor's location in the weight range. rows: the span's rows. first: the index of the first of these
    rows in the tensor. part: the part of the tensor's memory that the rows fill. Raises CheckpointError for numbers that cannot be
    held."""
    assert slot.relayout is not None
    with _of_span(span):
        rearrange(slot.relayout, rows, first, slot.group_inputs, part, CONVERT_ELEMENTS)


def check_codes(span: Span, read: npt.NDArray[np.uint8]) -> None:
    """Raises CheckpointError if one of the FP8 codes in a span (part of a read) stands for NaN. read: the span's bytes."""
    at = nan_at(read)
    if at >= 0:
        tensor, offset = span.segment.tensor, span.begin + at
        raise CheckpointError(tensor.file, tensor.name, f"holds NaN (the code {read[at]:#04x} at byte {offset} of the file)")
