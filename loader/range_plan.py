"""Which bytes of which file go where: reads in the order of the layers, each cut into segments, each segment's place in the weight
range.

A read is made of whole blocks, so that it can bypass the page cache. Where the block boundaries of a segment's place are those of
the file (layout.weight_layout sees to that), its whole blocks are read straight to their place: a direct span. The rest (the blocks
at a tensor's ends, tensors that lie otherwise, other dtypes) goes through a staging slot, at its position in the read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from loader.direct_io import BLOCK_BYTES, Alignment
from loader.dtypes import DTYPE_OF, ITEM_BYTES
from loader.errors import CheckpointError
from loader.formats.int8 import SCALE_BYTES
from loader.formats.weight_format import WeightSlot
from loader.packed import Frame
from loader.safetensors import DTYPE_BYTES, Header, TensorRef

MIN_DIRECT_BYTES = 32 << 10  # less than this is as cheap to copy, and a system call takes 1,024 pieces at most
ANY_ALIGNMENT = Alignment(1, 1)
QUANTIZED = "int8"


@dataclass(slots=True, frozen=True)
class Segment:
    """Consecutive whole elements of one tensor: bytes [begin, end) of its file belong at place_bytes of the weight range.

    target: the engine's dtype where it differs from the stored one, else "". "int8": whole rows to be quantised, whose
    scales belong at scales_at_bytes of the weight range. stage: see `stages`. frame: all of it, in a packed file; `content` is then
    what it holds, where bytes are counted as though the tensor lay there unpacked.
    """

    tensor: TensorRef
    begin: int
    end: int
    place_bytes: int
    target: str = ""
    scales_at_bytes: int = -1
    stage: int = 0
    frame: Frame | None = None
    content: Segment | None = None

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.tensor.shape[-1]

    @property
    def unit_bytes(self) -> tuple[int, int]:
        """Of what may not be cut, an element or a row to be quantised: in the file, and where it belongs."""
        item = DTYPE_BYTES[self.tensor.dtype]
        if self.target == QUANTIZED:
            return self.width * item, self.width
        return item, ITEM_BYTES[self.target] if self.target else item

    @property
    def places(self) -> list[tuple[int, int]]:
        """[begin, end) in the weight range of what it becomes: its values and, quantised, their scales."""
        if self.content is not None:
            return self.content.places
        unit, held_unit = self.unit_bytes
        num_units = (self.end - self.begin) // unit
        places = [(self.place_bytes, self.place_bytes + num_units * held_unit)]
        if self.target == QUANTIZED:
            places.append((self.scales_at_bytes, self.scales_at_bytes + num_units * SCALE_BYTES))
        return places


@dataclass(slots=True, frozen=True)
class Span:
    """Part of a segment, likewise."""

    segment: Segment
    begin: int
    end: int

    @property
    def place_bytes(self) -> int:
        return self.segment.place_bytes + self.begin - self.segment.begin


@dataclass(slots=True, frozen=True)
class Read:
    """Bytes [begin, end) of a file, on block boundaries (end may lie behind the file's), and the segments in it, in file order."""

    file: str
    begin: int
    end: int
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        """Of weights."""
        return sum(segment.end - segment.begin for segment in self.segments)

    @property
    def needed_bytes(self) -> int:
        """From `begin` to the last segment's end: what a read must bring at least."""
        return self.segments[-1].end - self.begin

    @property
    def places(self) -> list[tuple[int, int]]:
        """[begin, end) in the weight range of all that it brings, joined where one begins at the end of the other."""
        places: list[tuple[int, int]] = []
        for begin, end in sorted(place for segment in self.segments for place in segment.places):
            if places and places[-1][1] == begin:
                begin = places.pop()[0]
            places.append((begin, end))
        return places


def plan_reads(headers: Mapping[str, Header], layout: Iterable[WeightSlot], dtype: str, read_bytes: int) -> list[Read]:
    """Every parameter once, by the first stage that a read brings something for, else file by file in file order; read_bytes: the
    longest read, in whole blocks, two at least.

    Tensors that are no parameters are left out (open_checkpoint has refused those that should not be there). Raises CheckpointError
    naming a parameter that is missing or has another shape.
    """
    slots = {slot.name: slot for slot in layout}
    stage_of = {slot.name: slot.stage for slot in slots.values()}
    reads: list[Read] = []
    for file, header in headers.items():
        segments: list[Segment] = []
        for tensor in header.tensors:
            slot = slots.pop(tensor.name, None)
            if slot is None or not tensor.num_bytes:
                continue
            if slot.shape != tensor.shape:
                raise CheckpointError(file, tensor.name, f"has shape {list(tensor.shape)}, expected {list(slot.shape)}")
            target = "" if DTYPE_OF.get(tensor.dtype) == dtype else dtype
            if slot.scales_at_bytes >= 0:
                target = QUANTIZED
            num_bytes = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
            begin, stage = tensor.offset_bytes, stage_of[tensor.name]
            whole = Segment(tensor, begin, begin + num_bytes, slot.offset_bytes, target, slot.scales_at_bytes, stage)
            if whole.unit_bytes[0] > read_bytes - BLOCK_BYTES:
                raise CheckpointError(file, tensor.name, f"has rows of {whole.unit_bytes[0]} bytes: too long to be quantised")
            segments += [whole] if tensor.record is None else _framed(whole, read_bytes)
        reads += _cut(file, segments, read_bytes)
    for name in slots:
        raise CheckpointError(", ".join(headers), name, "missing: config.json asks for it")
    return sorted(reads, key=lambda read: min(segment.stage for segment in read.segments))


def _framed(whole: Segment, read_bytes: int) -> Iterator[Segment]:
    """A packed file's tensor, frame by frame. whole: as though it lay there unpacked. Raises CheckpointError for a frame that no
    read brings whole, or that ends within a row to be quantised."""
    left: Segment | None = whole
    end = whole.begin
    for frame in whole.tensor.frames:
        assert left is not None
        end += frame.num_bytes
        content, left = _split(left, end)
        num_bytes = frame.end - frame.begin // BLOCK_BYTES * BLOCK_BYTES
        if content is None or content.end != end or num_bytes > read_bytes:
            why = f"packed in pieces of {num_bytes} bytes, which no read of {read_bytes} brings in whole rows"
            raise CheckpointError(whole.tensor.file, whole.tensor.name, why)
        yield replace(content, begin=frame.begin, end=frame.end, frame=frame, content=content)


def _cut(file: str, segments: Iterable[Segment], read_bytes: int) -> list[Read]:
    reads: list[Read] = []
    begin, taken = 0, list[Segment]()

    def close() -> None:
        if taken:
            reads.append(Read(file, begin, _up(taken[-1].end), tuple(taken)))
            taken.clear()

    for segment in segments:
        left: Segment | None = segment
        while left is not None:
            if taken and left.begin >= _up(taken[-1].end) + BLOCK_BYTES:  # something lies between that nobody wants
                close()
            if not taken:
                begin = left.begin // BLOCK_BYTES * BLOCK_BYTES
            head, left = _split(left, begin + read_bytes)
            if head is not None:
                taken.append(head)
            if left is not None:
                close()
    close()
    return reads


def _split(segment: Segment, at: int) -> tuple[Segment | None, Segment | None]:
    """Before and from file position `at`, between two elements, or rows to be quantised."""
    if segment.end <= at:
        return segment, None
    if segment.begin >= at or segment.frame is not None:
        return None, segment
    unit, held_unit = segment.unit_bytes
    num_units = (at - segment.begin) // unit
    if not num_units:
        return None, segment
    cut = segment.begin + num_units * unit
    scales_at = segment.scales_at_bytes + num_units * SCALE_BYTES if segment.target == QUANTIZED else -1
    rest = replace(segment, begin=cut, place_bytes=segment.place_bytes + num_units * held_unit, scales_at_bytes=scales_at)
    return replace(segment, end=cut), rest


def direct_spans(read: Read, address: int, alignment: Alignment) -> list[Span]:
    """What the read may leave where it belongs, in a weight range that starts at `address`. ANY_ALIGNMENT: a buffered read."""
    spans = []
    for segment in read.segments:
        if segment.target or segment.frame is not None:  # a frame is checked before any of it counts
            continue
        begin = -(-segment.begin // alignment.offset_bytes) * alignment.offset_bytes
        end = segment.end // alignment.offset_bytes * alignment.offset_bytes
        place = address + segment.place_bytes + begin - segment.begin
        if end - begin >= MIN_DIRECT_BYTES and place % alignment.memory_bytes == 0:
            spans.append(Span(segment, begin, end))
    return spans


def staged_spans(read: Read, direct: Iterable[Span]) -> list[Span]:
    """What is left, to be copied from the slot; direct: of the same read, in file order."""
    inner = {id(span.segment): span for span in direct}
    spans = []
    for segment in read.segments:
        span = inner.get(id(segment))
        edges = [(segment.begin, segment.end)] if span is None else [(segment.begin, span.begin), (span.end, segment.end)]
        spans += [Span(segment, begin, end) for begin, end in edges if end > begin]
    return spans


def _up(position: int) -> int:
    return -(-position // BLOCK_BYTES) * BLOCK_BYTES
